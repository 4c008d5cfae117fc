"""A store's messages: what a worker says to the scheduler and the servers about one store, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kvstore.member.client import Me
from kvstore.consistency import Rule
from kvstore.errors import UsageError
from kvstore.optim import Optimizer
from kvstore.dist.outgoing import Load, Packer
from kvstore.dist.plans import Plan
from kvstore.member.session import Session
from kvstore.dist.parcels import Entry, Parcel, Piece
from kvstore.spec import Key, Spec
from kvstore.ticket import Ticket
from kvstore.values import Leaving, from_buffer, spec_of, to_buffer
from kvstore.wire import (
    MAX_STORES,
    Ack,
    Barrier,
    Buffer,
    Codec,
    Declare,
    GetStates,
    Init,
    Message,
    Open,
    Pause,
    Placed,
    Pull,
    Push,
    PutStates,
    Ready,
    Resume,
    SetOptimizer,
    States,
    Values,
    join,
    tear,
)


class Hyper(NamedTuple):
    """The numbers of a push: ``changes``, as messages carry them, are those that differ from the optimizer's."""

    lr: float | None
    rescale: float | None
    changes: list[list[Any]]


class Back(NamedTuple):
    """Values on their way back: who takes them, how they are to come, and how many bytes of the window they take."""

    take: Callable[[Values], None]
    codec: Codec
    nbytes: int


class Remote:
    """The far side of one store. Methods that take or give a ticket return at once; the others wait for the answer.

    Args:
        session: this process's membership in the job.
        timeout_s: the deadline of every wait.
    """

    def __init__(self, session: Session, timeout_s: float) -> None:
        self.number = session.new_store()
        if self.number >= MAX_STORES:
            raise UsageError(f"this process has made {MAX_STORES} dist stores, which is the most a job can have")
        self._session = session
        self._client = session.client
        self._timeout_s = timeout_s
        self.packer = Packer(session.client.memory)
        self.sent = 0  # bytes of gradients

    def open(self, rule: Rule) -> None:
        """Tell all servers that this worker uses the store, and by which rule."""
        self._all(
            Ticket("opening the store", (), self._client),
            lambda me: Open(
                *me, self.number, rule.mode, rule.staleness, rule.quorum, rule.late, float(rule.compensation)
            ),
        )

    def declare(self, specs: Mapping[Key, Spec], bound: int, longest: int) -> dict[Key, Entry]:
        """Have new keys placed (rank 0), or wait until rank 0's values of them are on the servers."""
        keys = list(specs)
        placed: Placed = self._one(
            self._session.scheduler,
            Ticket("init", keys, self._client),
            lambda me: Declare(
                *me,
                store=self.number,
                keys=keys,
                shapes=[list(spec.shape) for spec in specs.values()],
                dtypes=[spec.dtype for spec in specs.values()],
                bound=bound,
                longest=longest,
            ),
        )
        return {
            key: Entry(spec, [Piece(number, server, key, start, stop) for number, server, start, stop in segments])
            for (key, spec), segments in zip(specs.items(), placed.segments, strict=True)
        }

    def put_values(self, plan: Plan, values: Leaving) -> None:
        """Give the servers the first values of a plan's keys, then tell the scheduler."""
        ticket = Ticket("init", plan.keys, self._client)
        for parcel in plan.parcels:
            self._init(ticket, parcel, self.packer.pack(parcel, values))
        ticket.wait(self._timeout_s)
        self._one(
            self._session.scheduler,
            Ticket("init", plan.keys, self._client),
            lambda me: Ready(*me, store=self.number, keys=list(plan.keys)),
        )

    def _init(self, ticket: Ticket, parcel: Parcel, buffers: Sequence[Buffer]) -> None:
        self._client.ask(
            self._session.servers[parcel.server],
            ticket,
            lambda me: Init(
                *me,
                store=self.number,
                ids=parcel.ids,
                keys=[piece.key for piece in parcel.pieces],
                shapes=[
                    [piece.stop - piece.start] if entry.cut else list(entry.spec.shape)
                    for piece, entry in zip(parcel.pieces, parcel.entries, strict=True)
                ],
                dtype=parcel.dtype,
                buffers=buffers,
            ),
        )

    def push(
        self,
        ticket: Ticket,
        parcel: Parcel,
        load: Load,
        hyper: Hyper,
        back: Back | None,
        note: Callable[[Ack], None] | None = None,
        priority: int | None = None,
        in_turn: int | None = None,
    ) -> None:
        """Send this worker's contribution to a parcel's pieces.

        Args:
            load: is packed when the message goes.
            hyper: what to update with in this round.
            back: what is to become of the new values; None if they are not wanted.
            note: gets the answer, if it has no values.
            priority: of this message, and of its answer, among those that wait to leave; see ``Transport.send``.
            in_turn: None sends it at once; else it may wait for its turn, with this priority, and be read when it
                leaves: see ``Client.lending``.
        """
        clocks, peer = parcel.clocks(), self._session.servers[parcel.server]
        way = None if back is None else back.codec

        def make(me: Me) -> Push:
            buffers, codec, lengths, spans = load.pack(parcel, in_turn is not None and self._client.gathers(peer))
            self.sent += parcel.nbytes if codec is None else sum(lengths)
            return Push(
                *me,
                store=self.number,
                ids=parcel.ids,
                clocks=clocks,
                want=back is not None,
                lr=hyper.lr,
                rescale=hyper.rescale,
                codec=codec,
                lengths=list(lengths),
                spans=list(spans),
                back=way,
                changes=hyper.changes,
                priority=priority,
                buffers=buffers,
            )

        if in_turn is None or back is None:
            self._client.ask(peer, ticket, make, note if back is None else back.take, priority)
        else:
            self._client.ask_in_turn(peer, ticket, make, back.take, back.nbytes, in_turn)

    def pull(self, ticket: Ticket, parcel: Parcel, priority: int, back: Back) -> None:
        """Ask, in turn, for the values of a parcel's pieces that include this worker's contributions so far."""
        clocks = parcel.clocks()
        self._client.ask_in_turn(
            self._session.servers[parcel.server],
            ticket,
            lambda me: Pull(*me, self.number, parcel.ids, clocks, back.codec),
            back.take,
            back.nbytes,
            priority,
        )

    def set_optimizer(self, version: int, optimizer: Optimizer) -> None:
        """Have all servers update with ``optimizer``."""
        self._all(
            Ticket("set_optimizer", (), self._client),
            lambda me: SetOptimizer(
                *me,
                store=self.number,
                version=version,
                name=optimizer.name,
                hyper=[[name, value] for name, value in optimizer.hyper.items()],
                clip_gradient=optimizer.clip_gradient,
                lr_mult=[[key, value] for key, value in optimizer.lr_mult.items()],
                wd_mult=[[key, value] for key, value in optimizer.wd_mult.items()],
                lr=optimizer.lr,
                rescale=optimizer.rescale_grad,
                groups=[[list(group.keys), [[*pair] for pair in group.hyper.items()]] for group in optimizer.groups],
            ),
        )

    def optimizer(self) -> str | None:
        """Return the name of the optimizer that the servers have, or None."""
        reply: States = self._one(
            self._session.servers[0],
            Ticket("asking for the optimizer", (), self._client),
            lambda me: GetStates(*me, store=self.number, ids=[]),
        )
        return reply.optimizer

    def get_states(self, parcel: Parcel) -> dict[tuple[Piece, str], torch.Tensor]:
        """Return the optimizer's states of a parcel's pieces, by (piece, name of the state)."""
        reply: States = self._one(
            self._session.servers[parcel.server],
            Ticket("save_optimizer_states", (), self._client),
            lambda me: GetStates(*me, store=self.number, ids=parcel.ids),
        )
        by_id = {piece.id: piece for piece in parcel.pieces}
        specs = [Spec(tuple(shape), dtype) for shape, dtype in zip(reply.shapes, reply.dtypes, strict=True)]
        parts = tear(reply.buffers, [spec.nbytes for spec in specs])
        return {
            (by_id[number], name): from_buffer(part, spec.dtype).view(spec.shape)
            for number, name, spec, part in zip(reply.ids, reply.names, specs, parts, strict=True)
        }

    def put_states(self, server: int, states: Mapping[tuple[Piece, str], torch.Tensor]) -> None:
        """Give a server the optimizer's states of pieces that it holds."""
        specs = [spec_of(value) for value in states.values()]
        self._one(
            self._session.servers[server],
            Ticket("load_optimizer_states", (), self._client),
            lambda me: PutStates(
                *me,
                store=self.number,
                ids=[piece.id for piece, _ in states],
                names=[name for _, name in states],
                shapes=[list(spec.shape) for spec in specs],
                dtypes=[spec.dtype for spec in specs],
                buffers=join([to_buffer(value.contiguous()) for value in states.values()]),
            ),
        )

    def barrier(self, number: int) -> Ticket:
        """Return a ticket that is done when all workers have come to the store's barrier ``number``."""
        ticket = Ticket("barrier", (), self._client)
        self._client.ask(self._session.scheduler, ticket, lambda me: Barrier(*me, store=self.number, number=number))
        return ticket

    def announce_pause(self, number: int) -> None:
        """Tell the scheduler of this worker's pause ``number``, before any server lets others go on because of it."""
        self._one(
            self._session.scheduler,
            Ticket("join", (), self._client),
            lambda me: Pause(*me, store=self.number, number=number, pushes=0, ids=[], clocks=[]),
        )

    def pause(self, number: int, entries: Mapping[Key, Entry], take: Callable[[Sequence[int], Resume], None]) -> Ticket:
        """Tell all servers that this worker has nothing more to contribute; done when they let it go on.

        Args:
            take: is given each server's answer, with the pieces that it is about.
        """
        ticket = Ticket("join", (), self._client, timeout_s=self._timeout_s)
        pushes = sum(entry.clock for entry in entries.values())
        clocks: list[dict[int, int]] = [{} for _ in self._session.servers]
        for entry in entries.values():
            for piece in entry.pieces:
                clocks[piece.server][piece.id] = entry.clock
        for peer, its in zip(self._session.servers, clocks, strict=True):
            self._client.ask(peer, ticket, *self._pausing(number, pushes, its, take))
        return ticket

    def _pausing(
        self, number: int, pushes: int, clocks: dict[int, int], take: Callable[[Sequence[int], Resume], None]
    ) -> tuple[Callable[[Me], Message], Callable[[Resume], None]]:
        ids = list(clocks)
        return (
            lambda me: Pause(*me, self.number, number, pushes, ids, list(clocks.values())),
            lambda reply: take(ids, reply),
        )

    def _one(self, peer: bytes, ticket: Ticket, make: Callable[[Me], Message]) -> Any:
        self._client.ask(peer, ticket, make, ticket.take)
        return ticket.wait(self._timeout_s)

    def _all(self, ticket: Ticket, make: Callable[[Me], Message]) -> None:
        for peer in self._session.servers:
            self._client.ask(peer, ticket, make)
        ticket.wait(self._timeout_s)
