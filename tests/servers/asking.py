"""What tests say to a shard or a scheduler, and what they hear: one member each, without any transport."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvstore import wire
from kvstore.values import from_buffer, to_buffer
from servers.shard import Shard
from servers.store.recording import Recorder
from servers.store.target import HeldSegment


def floats(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def sender(rank: int = 0, seq: int = 1, *, done: int = 0, role: str = "worker", incarnation: int = 1) -> wire.Sender:
    return wire.Sender(wire.Node(role, rank, incarnation), seq, done)


def sent(message: wire.Message) -> Any:
    """``message`` as it arrives at the other end, in memory of its own."""
    return wire.decode([bytearray(frame) for frame in wire.encode(message)])


class Door:
    """What is decided about links, and what is known of them.

    Args:
        keys: the key that each has proved.
    """

    def __init__(self, keys: dict[bytes, str] | None = None) -> None:
        self.keys = keys or {}
        self.admitted: list[bytes] = []
        self.refused: list[bytes] = []
        self.ended: set[bytes] = set()

    def admit(self, peer: bytes) -> None:
        self.admitted.append(peer)

    def refuse(self, peer: bytes) -> None:
        self.refused.append(peer)

    def identity(self, peer: bytes) -> str:
        return self.keys.get(peer, "")

    def gone(self, peer: bytes) -> bool:
        return peer in self.ended


class Worker:
    """Makes the requests of one worker, or aggregator, numbered as it would."""

    def __init__(self, rank: int = 0, incarnation: int = 1, role: str = "worker") -> None:
        self.rank = rank
        self.role = role
        self.incarnation = incarnation
        self.peer = b"link of %s %d.%d" % (role.encode(), rank, incarnation)
        self.seq = 0
        self.done = 0

    @property
    def node(self) -> wire.Node:
        return wire.Node(self.role, self.rank, self.incarnation)

    @property
    def name(self) -> int | str:
        """A worker's rank, or another member's name: by which ``Desk`` sorts replies."""
        return self.rank if self.role == "worker" else str(self.node)

    def me(self) -> wire.Sender:
        self.seq += 1
        return wire.Sender(self.node, self.seq, self.done)

    def open(self, mode: str = "sync", store: int = 0, lineage: int = 7000, **rule: Any) -> wire.Open:
        return wire.Open(self.me(), store=store, mode=mode, lineage=lineage, **rule)

    def init(self, values: dict[int, torch.Tensor], store: int = 0, keys: list[Any] | None = None) -> wire.Init:
        return wire.Init(
            self.me(),
            store=store,
            ids=list(values),
            keys=keys or [f"k{number}" for number in values],
            kinds=list(range(len(values))),
            shapes=[list(value.shape) for value in values.values()],
            dtype=str(next(iter(values.values()), torch.empty(0)).dtype).removeprefix("torch."),
            buffers=[to_buffer(value.contiguous()) for value in values.values()],
        )

    def push(
        self,
        values: dict[int, torch.Tensor],
        clock: int | list[int] = 1,
        *,
        want: bool = False,
        lr: float | None = None,
        rescale: float | None = None,
        store: int = 0,
        ranks: Sequence[int] = (),
        rank_clocks: Sequence[int] = (),
        back: Any = None,
        weight: float | None = None,
    ) -> wire.Push:
        return wire.Push(
            self.me(),
            store=store,
            ids=list(values),
            clocks=[clock] * len(values) if isinstance(clock, int) else clock,
            want=want,
            lr=lr,
            rescale=rescale,
            ranks=list(ranks),
            rank_clocks=list(rank_clocks),
            back=back,
            weight=weight,
            buffers=[to_buffer(value.contiguous()) for value in values.values()],
        )

    def pull(
        self, ids: list[int], clock: int | list[int] = 0, store: int = 0, *, ranks: Sequence[int] = (), back: Any = None
    ) -> wire.Pull:
        clocks = [clock] * len(ids) if isinstance(clock, int) else clock
        return wire.Pull(self.me(), store=store, ids=ids, clocks=clocks, back=back, ranks=list(ranks))

    def pause(self, clocks: dict[int, int], number: int = 1, store: int = 0) -> wire.Pause:
        pushes = sum(clocks.values())
        return wire.Pause(self.me(), store, number, pushes, list(clocks), list(clocks.values()))

    def set_optimizer(
        self, name: str = "sgd", lr: float = 0.5, version: int = 1, store: int = 0, **hyper: Any
    ) -> wire.SetOptimizer:
        return wire.SetOptimizer(
            self.me(),
            store=store,
            version=version,
            name=name,
            hyper=[[key, value] for key, value in hyper.items()],
            clip_gradient=None,
            lr_mult=[],
            wd_mult=[],
            lr=lr,
            rescale=1.0,
        )

    def get_states(self, ids: list[int], store: int = 0) -> wire.GetStates:
        return wire.GetStates(self.me(), store=store, ids=ids)

    def put_states(self, states: dict[tuple[int, str], torch.Tensor], store: int = 0) -> wire.PutStates:
        return wire.PutStates(
            self.me(),
            store=store,
            ids=[number for number, _ in states],
            names=[name for _, name in states],
            shapes=[list(value.shape) for value in states.values()],
            dtypes=[str(value.dtype).removeprefix("torch.") for value in states.values()],
            buffers=wire.pack_arrays([to_buffer(value.contiguous()) for value in states.values()]),
        )

    def explain(self, about: int) -> wire.Explain:
        return wire.Explain(self.me(), about=about)


def some_rows(message: wire.Push, runs: Sequence[Sequence[int]], rows: Sequence[Mapping[int, Any]]) -> wire.Push:
    """``message`` with some rows by id, in this order, for each of ``runs``, in place of all elements."""
    ids = np.array([each for of in rows for each in of], np.int64)
    every = [row for of in rows for row in of.values()]
    values = [row if isinstance(row, torch.Tensor) else floats(*row) for row in every]
    return dataclasses.replace(
        message,
        runs=list(map(list, runs)),
        buffers=[
            np.array(list(map(len, rows)), np.int64).tobytes(),
            ids.tobytes(),
            to_buffer(torch.cat(values)) if values else b"",
        ],
    )


class Desk:
    """A shard with workers before it, and aggregators that speak for the workers in ``aggregated``.

    ``ask`` returns the replies by (rank, seq) in the order they were given; for an aggregator, by (its name, seq).
    """

    def __init__(
        self,
        workers: int = 2,
        mode: str = "sync",
        values: dict[int, torch.Tensor] | None = None,
        aggregated: Sequence[Sequence[int]] = (),
        recorder: Recorder | None = None,
        min_workers: int = 0,
        **rule: Any,
    ) -> None:
        self.shard = Shard(0, workers, aggregated=aggregated, recorder=recorder, min_workers=min_workers)
        self.workers = [Worker(rank) for rank in range(workers)]
        self.aggregators = [Worker(rank, role="aggregator") for rank in range(len(aggregated))]
        self.names = {member.peer: member.name for member in self.workers + self.aggregators}
        for worker in self.workers:
            assert self.reply(worker, worker.open(mode, **rule)) == wire.Ack(worker.seq)
        if values is not None:
            worker = self.workers[0]
            assert self.reply(worker, worker.init(values)) == wire.Ack(worker.seq)

    def and_workers(self) -> tuple[Any, ...]:
        """Itself and its workers, for a test to name."""
        return self, *self.workers

    def and_aggregators(self) -> tuple[Any, ...]:
        return self, *self.aggregators

    def ask(self, worker: Worker, message: wire.Message) -> dict[tuple[int | str, int], Any]:
        return self.named(self.shard.handle(worker.peer, sent(message)))

    def named(self, outbox: list[tuple[bytes, wire.Message]]) -> dict[tuple[int | str, int], Any]:
        replies: dict[tuple[int | str, int], Any] = {}
        for peer, reply in outbox:
            assert (self.names[peer], reply.seq) not in replies, "answered twice"
            replies[self.names[peer], reply.seq] = sent(reply)
        return replies

    def reply(self, worker: Worker, message: wire.Message) -> Any:
        """The reply to ``message``, the only one there is; None if there is none yet."""
        replies = self.ask(worker, message)
        assert replies.keys() <= {(worker.name, message.seq)}
        return replies.get((worker.name, message.seq))

    def segment(self, number: int, store: int = 0) -> HeldSegment:
        return self.shard.stores[store].buckets.segment(number)

    def value(self, number: int = 1, clock: int = 0, store: int = 0) -> torch.Tensor:
        reply = self.reply(self.workers[0], self.workers[0].pull([number], clock, store))
        assert isinstance(reply, wire.Values), reply
        return values_in(reply, [self.segment(number, store).spec])[0]


def values_in(reply: wire.Values, specs: list[Any]) -> list[torch.Tensor]:
    """The values of segments of these specs, which may have more than one dtype here."""
    payload, values, start = bytearray(b"".join(reply.buffers)), [], 0
    for spec in specs:
        values.append(from_buffer(payload[start : start + spec.nbytes], spec.dtype).view(spec.shape))
        start += spec.nbytes
    assert start == len(payload)
    return values


def text_of(reply: Any, kind: str) -> str:
    assert isinstance(reply, wire.Failure), reply
    assert reply.kind == kind
    return reply.text


def optimized(desk: Desk, name: str = "sgd", lr: float = 0.5, **hyper: object) -> Desk:
    first = desk.workers[0]
    assert desk.reply(first, first.set_optimizer(name, lr, **hyper)) == wire.Ack(first.seq)
    return desk


def updating(workers: int, mode: str = "async", **rule: Any) -> Desk:
    """A shard whose value is 0 and whose optimizer subtracts the gradient; all workers have set it."""
    desk = Desk(workers, mode, values={1: floats(0)}, **rule)
    waiting = [desk.ask(worker, worker.set_optimizer("sgd", lr=1.0)) for worker in reversed(desk.workers)]
    assert len(waiting[-1]) == workers
    return desk


def read(desk: Desk, reply: Any, number: int = 1) -> torch.Tensor:
    assert isinstance(reply, wire.Values), reply
    return values_in(reply, [desk.segment(number).spec])[0]
