"""The requests that push and pull arrays and rows, until they are answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvstore import wire
from kvstore.client.entries import Carried, PushClocks
from kvstore.client.optimizing import PushNumbers
from kvstore.client.pack import Load
from kvstore.client.pack_rows import OutgoingRows, room, sendable
from kvstore.client.plans import Parcel, RowPlan
from kvstore.client.unpack import Decode, Writer
from kvstore.client.unpack_rows import RowReader
from kvstore.member.outstanding import Effect, PendingRequest, Turn
from kvstore.member.session import Session
from kvstore.spec import Key
from kvstore.ticket import Operation
from kvstore.transport import Peer

WORTH_NOTING = 64 << 10  # bytes; copies of fewer take less time than it takes to note them


class Asker(NamedTuple):
    """What all requests of a store have in common."""

    store: int
    session: Session  # of this process
    clocks: PushClocks  # of this worker's keys
    # returns the effect of an answer on counters and clocks, given what was asked about, the answer, how many bytes of
    # gradients went out, and whether the values have been written
    answered: Callable[[Carried, wire.Ack | wire.Rows | wire.Values, int, bool], Effect]


class StoreRequest(PendingRequest):
    """A request about the segments of one message."""

    __slots__ = ("asker", "clocks", "sent")

    def __init__(
        self,
        asker: Asker,
        peer: Peer,
        operation: Operation,
        clocks: list[int],
        order: int | None = None,
        turn: Turn | None = None,
    ) -> None:
        super().__init__(peer, operation, order if turn is None else None, turn)
        self.asker = asker
        self.clocks = clocks
        self.sent = 0  # bytes of gradients that the message carries; 0 until it is made


# ---- arrays


class IncomingParcel(NamedTuple):
    """How the values of a parcel come: into what, in which encoding, and when they may be asked for."""

    writer: Writer
    decode: Decode | None
    codec: wire.CodecDescription
    turn: Turn | None


class _ArrayRequest(StoreRequest):
    """A request about a parcel's segments; ``incoming`` is None where their values are not wanted, or no longer."""

    __slots__ = ("codec", "incoming", "parcel")

    def __init__(
        self,
        asker: Asker,
        operation: Operation,
        parcel: Parcel,
        clocks: list[int],
        incoming: IncomingParcel | None,
        order: int | None = None,
    ) -> None:
        turn = None if incoming is None else incoming.turn
        super().__init__(asker, asker.session.carrier(parcel.server), operation, clocks, order, turn)
        self.parcel = parcel
        self.incoming = incoming
        self.codec = None if incoming is None else incoming.codec  # kept: a message may be made once nobody reads it

    def take(self, reply: Any) -> Effect:
        incoming = self.incoming
        if incoming is not None:
            tracer = self.asker.session.tracer
            if tracer is not None and not (tracer.open and self.parcel.nbytes >= WORTH_NOTING):
                tracer = None
            began = 0.0 if tracer is None else tracer.clock()
            incoming.writer.take(self.parcel, reply, incoming.decode)
            if tracer is not None:
                tracer.span(
                    "unpack" if incoming.decode is None else "decode", began, self.operation.keys, self.parcel.nbytes
                )
        return self.asker.answered(self.parcel, reply, self.sent, incoming is not None)

    @property
    def traced(self) -> tuple[str, Sequence[Key], int]:
        return self.operation.what, self.operation.keys, self.parcel.nbytes

    def forsake(self) -> None:
        self.incoming = None


class PullOfArrays(_ArrayRequest):
    """The values that include this worker's contributions so far."""

    __slots__ = ()

    def __init__(self, asker: Asker, operation: Operation, parcel: Parcel, incoming: IncomingParcel | None) -> None:
        super().__init__(asker, operation, parcel, asker.clocks.of(parcel), incoming)

    def message(self, sender: wire.Sender) -> wire.Pull:
        return wire.Pull(sender, self.asker.store, self.parcel.ids, self.clocks, self.codec)

    def forsake(self) -> None:
        self.incoming = None
        self.operation.raised = True


class PushOfArrays(_ArrayRequest):
    """This worker's contribution to a parcel's segments. Its values are packed, or encoded, when it is sent."""

    __slots__ = ("load", "numbers", "want")
    early = False  # made before, it would need a copy of arrays that a waiting caller leaves as they are

    def __init__(
        self,
        asker: Asker,
        operation: Operation,
        parcel: Parcel,
        incoming: IncomingParcel | None,
        load: Load,
        numbers: PushNumbers,
    ) -> None:
        super().__init__(asker, operation, parcel, asker.clocks.after(parcel), incoming, numbers.order)
        self.load = load
        self.numbers = numbers
        self.want = incoming is not None

    def message(self, sender: wire.Sender) -> wire.Push | wire.PushLent:
        gather = self.turn is not None and self.asker.session.client.gathers(self.peer)
        tracer = self.asker.session.tracer
        if tracer is not None and not (tracer.open and self.parcel.nbytes >= WORTH_NOTING):
            tracer = None
        began = 0.0 if tracer is None else tracer.clock()
        buffers, codec, lengths, segment_counts, encode, in_float32, loan = self.load(self.parcel, gather)
        if tracer is not None:
            tracer.span("pack" if codec is None else "encode", began, self.operation.keys, self.parcel.nbytes)
        plain = self.parcel.sum_bytes if in_float32 else self.parcel.nbytes
        self.sent = plain if codec is None else sum(lengths)
        lr, rescale, changes, order = self.numbers
        push = wire.Push(
            sender,
            store=self.asker.store,
            ids=self.parcel.ids,
            clocks=self.clocks,
            want=self.want,
            lr=lr,
            rescale=rescale,
            codec=codec,
            lengths=list(lengths),
            segment_counts=list(segment_counts),
            back=self.codec,
            changes=changes,
            priority=order,
            encode=encode,
            in_float32=in_float32,
            buffers=buffers,
        )
        return push if loan is None else wire.PushLent.of(push, loan)


# ---- rows of tables


class RowCall(NamedTuple):
    """Tables that share their messages, one for each server."""

    plan: RowPlan  # of the tables
    contribution: OutgoingRows | None  # the rows to push; None to push nothing
    reader: RowReader | None  # takes the rows that come back; None if none are wanted


class _RowRequest(StoreRequest):
    """A request about the stripes that one server has; ``reader`` is None where no rows are wanted, or no longer.

    It goes to the server itself: aggregators know no tables.
    """

    __slots__ = ("parcel", "plan", "reader")

    def __init__(
        self,
        asker: Asker,
        operation: Operation,
        call: RowCall,
        server: int,
        clocks: list[int],
        order: int | None,
        turn: Turn | None,
    ) -> None:
        super().__init__(asker, asker.session.servers[server], operation, clocks, order, turn)
        self.plan = call.plan
        self.parcel = call.plan.parcels[server]
        self.reader = call.reader

    def take(self, reply: Any) -> Effect:
        reader = self.reader
        if reader is not None:
            reader.take(self.parcel, reply)
        return self.asker.answered(self.parcel, reply, self.sent, reader is not None)

    def forsake(self) -> None:
        self.reader = None


class PullOfRows(_RowRequest):
    """The rows that include this worker's contributions so far."""

    __slots__ = ("counts", "ids")

    def __init__(
        self, asker: Asker, operation: Operation, call: RowCall, server: int, reader: RowReader, priority: int
    ) -> None:
        clocks = asker.clocks.of(call.plan.parcels[server])
        super().__init__(asker, operation, call, server, clocks, None, Turn(reader.nbytes(server), priority))
        self.counts, self.ids = reader.counts(server), reader.ids(server)

    def message(self, sender: wire.Sender) -> wire.PullRows:
        return wire.PullRows(
            sender,
            store=self.asker.store,
            ids=self.parcel.ids,
            clocks=self.clocks,
            wanted=self.counts,
            wide=self.plan.wide,
            codecs=self.plan.codecs,
            buffers=[sendable(self.ids, self.asker.session.client)],
        )

    def forsake(self) -> None:
        self.reader = None
        self.operation.raised = True


class PushOfRows(_RowRequest):
    """This worker's contribution to the stripes of a parcel. The rows are copied, or encoded, when it is sent.

    Args:
        priority: of its turn, if its rows are waited for; None: it goes at once.
    """

    __slots__ = ("contribution", "counts", "ids", "numbers", "union", "want")
    early = False

    def __init__(
        self,
        asker: Asker,
        operation: Operation,
        call: RowCall,
        server: int,
        contribution: OutgoingRows,
        numbers: PushNumbers,
        priority: int | None,
    ) -> None:
        parcel, reader = call.plan.parcels[server], call.reader
        turn = None if reader is None or priority is None else Turn(reader.nbytes(server), priority)
        super().__init__(asker, operation, call, server, asker.clocks.after(parcel), numbers.order, turn)
        self.contribution, self.numbers = contribution, numbers
        self.want = reader is not None
        self.union = reader is not None and reader.union
        self.counts = [0] * len(parcel.ids) if reader is None else reader.counts(server)
        self.ids = None if reader is None else reader.ids(server)

    def message(self, sender: wire.Sender) -> wire.PushRows:
        server, memory = self.parcel.server, self.asker.session.client
        lr, rescale, changes, order = self.numbers
        ids = self.contribution.ids(server)
        pushed = sendable(ids, memory)
        if self.ids is None:
            wanted: wire.Buffer = b""
        else:
            wanted = pushed if self.ids is ids else sendable(self.ids, memory)
        self.sent = self.contribution.nbytes(server)
        rows = room(self.sent, memory)
        self.contribution.write(server, rows)
        return wire.PushRows(
            sender,
            store=self.asker.store,
            ids=self.parcel.ids,
            clocks=self.clocks,
            counts=self.contribution.counts(server),
            wanted=self.counts,
            wide=self.plan.wide,
            want=self.want,
            union=self.union,
            lr=lr,
            rescale=rescale,
            changes=changes,
            codecs=self.plan.codecs,
            priority=order,
            buffers=[pushed, rows, wanted],
        )
