"""What the tests of the aggregator share: one aggregator, with workers before it and servers of a test's choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from asking import Worker, sent

from kvstore import wire
from kvstore.transport.memory import Heap
from kvstore.values import from_buffer, to_buffer
from servers.aggregator.aggregator import Aggregator
from servers.aggregator.exchanges import Exchange
from servers.aggregator.loans import Loans


def describe(worker: Worker, segments: dict[int, tuple[Any, int, int]], dtype: str = "float32") -> wire.Describe:
    """What a worker tells of segments: by id, the key, server and size; each is a whole array."""
    return wire.Describe(
        worker.me(),
        store=0,
        keys=[key for key, _, _ in segments.values()],
        kinds=list(range(len(segments))),
        shapes=[[size] for _, _, size in segments.values()],
        dtypes=[dtype] * len(segments),
        counts=[1] * len(segments),
        ids=list(segments),
        servers=[server for _, server, _ in segments.values()],
        sizes=[size for _, _, size in segments.values()],
    )


class Host:
    """An aggregator, and the workers of its host.

    Args:
        ranks: of the workers.
        segments: see ``describe``.
        mode, rule: of the store.
        loans: opens what workers lend.

    Attributes:
        workers: by rank.
        sent: the requests to servers that have not been answered.
        explained: what servers have been asked: the exchange, the link and number of the worker's question.
        now: the time.
    """

    def __init__(
        self,
        ranks: Sequence[int] = (2, 3),
        segments: dict[int, tuple[Any, int, int]] | None = None,
        mode: str = "sync",
        dtype: str = "float32",
        loans: Loans | None = None,
        **rule: Any,
    ) -> None:
        self.sent: list[Exchange] = []
        self.explained: list[tuple[Exchange, bytes, int]] = []
        self.now = 0.0
        self.core = Aggregator(ranks, Heap(), self, loans=loans)
        self.workers = {rank: Worker(rank) for rank in ranks}
        self._ranks = {worker.peer: rank for rank, worker in self.workers.items()}
        self._dtype = dtype
        for worker in self.workers.values():
            assert self.reply(worker, worker.open(mode, **rule)) == wire.Ack(worker.seq)
            known = segments or {1: ("a", 0, 2), 2: ("b", 0, 2), 3: ("c", 1, 2)}
            assert self.reply(worker, describe(worker, known, dtype)) == wire.Ack(worker.seq)

    # ---- the servers

    def send(self, exchange: Exchange) -> None:
        self.sent.append(exchange)

    def explain(self, exchange: Exchange, peer: bytes, seq: int) -> None:
        self.explained.append((exchange, peer, seq))

    def take(self) -> Exchange:
        (exchange,) = self.sent
        self.sent.clear()
        return exchange

    def answer(self, exchange: Exchange, reply: wire.Reply) -> dict[tuple[int, int], Any]:
        return self.named(self.core.answered(exchange, reply))

    # ---- the workers

    def ask(self, rank: int, message: wire.Message) -> dict[tuple[int, int], Any]:
        return self.named(self.core.handle(self.workers[rank].peer, sent(message), self.now))

    def reply(self, worker: Worker, message: wire.Message) -> Any:
        return self.ask(worker.rank, message).get((worker.rank, message.seq))

    def named(self, outbox: list[tuple[bytes, wire.Message]]) -> dict[tuple[int, int], Any]:
        replies: dict[tuple[int, int], Any] = {}
        for peer, reply in outbox:
            assert (self._ranks[peer], reply.seq) not in replies, "answered twice"
            replies[self._ranks[peer], reply.seq] = sent(reply)
        return replies

    def push(self, rank: int, values: dict[int, list[float]], clock: int | list[int] = 1, **fields: Any) -> wire.Push:
        """A worker's push, which has been taken, and waits."""
        dtype = getattr(torch, self._dtype)
        message = self.workers[rank].push({n: torch.tensor(v, dtype=dtype) for n, v in values.items()}, clock)
        message = wire.Push(**{**vars(message), **fields})
        assert self.ask(rank, message) == {}
        return message


def total(exchange: Exchange, dtype: str = "float32") -> list[float]:
    return from_buffer(bytearray(b"".join(exchange.fields["buffers"])), dtype).tolist()


def values(*numbers: float, **fields: Any) -> wire.Values:
    return wire.Values(0, buffers=[to_buffer(torch.tensor(numbers, dtype=torch.float32))], **fields)


def floats_in(reply: Any) -> list[float]:
    assert isinstance(reply, wire.Values), reply
    return from_buffer(bytearray(b"".join(reply.buffers)), "float32").tolist()
