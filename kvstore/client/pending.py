"""The requests that push and pull arrays, until they are answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from kvstore import wire
from kvstore.client.entries import PushClocks
from kvstore.client.lending import LentLoad
from kvstore.client.optimizing import PushHyperparameters
from kvstore.client.pack import Load
from kvstore.client.pack_rows import OutgoingRows, room, sendable
from kvstore.client.plans import Parcel, RowParcel, RowPlan
from kvstore.client.unpack import Decode, Writer
from kvstore.client.unpack_rows import RowReader
from kvstore.member.outstanding import Effect, PendingRequest, Turn
from kvstore.member.session import Session
from kvstore.spec import Key
from kvstore.ticket import Operation
from kvstore.tracing.tracer import Tracer
from kvstore.transport import Peer
from kvstore.transport.memory import Memory

WORTH_NOTING = 64 << 10  # bytes; copies of fewer take less time than it takes to note them


class ParcelNoted(Protocol):
    """Returns the effect of an answer on the counters and clocks."""

    def __call__(self, parcel: Parcel, reply: wire.Ack | wire.Values, pushed: int, pulled: bool) -> Effect:
        """See ``Pushes.noted``."""
        ...


class ArrayAsker(NamedTuple):
    """What all requests for arrays of a store have in common.

    Attributes:
        store: its number.
        session: of this process: who is asked, and whose links carry the messages.
        clocks: of this worker's keys.
        noted: see ``ParcelNoted``.
    """

    store: int
    session: Session
    clocks: PushClocks
    noted: ParcelNoted


class IncomingParcel(NamedTuple):
    """How the values of a parcel come: into what, in which encoding, and when they may be asked for."""

    writer: Writer
    decode: Decode | None
    codec: wire.CodecDescription
    turn: Turn | None


class PushedValues(NamedTuple):
    """What all messages of a push have in common: values, hyper-parameters, and the order among other messages."""

    load: Load
    hyper: PushHyperparameters
    order: int | None


class _ArrayRequest(PendingRequest):
    """A request about a parcel's segments; ``incoming`` is None where their values are not wanted, or no longer."""

    __slots__ = ("asker", "clocks", "codec", "incoming", "parcel")

    def __init__(
        self,
        asker: ArrayAsker,
        operation: Operation,
        parcel: Parcel,
        clocks: list[int],
        incoming: IncomingParcel | None,
        order: int | None,
    ) -> None:
        turn = None if incoming is None else incoming.turn
        super().__init__(asker.session.carrier(parcel.server), operation, order if turn is None else None, turn)
        self.asker = asker
        self.parcel = parcel
        self.clocks = clocks
        self.incoming = incoming
        self.codec = None if incoming is None else incoming.codec

    def take(self, reply: Any) -> Effect:
        """See ``PendingRequest``."""
        incoming = self.incoming
        if incoming is not None:
            tracer = self.asker.session.tracer
            if tracer is not None and not self._is_noted(tracer):
                tracer = None
            began = 0.0 if tracer is None else tracer.clock()
            incoming.writer.take(self.parcel, reply, incoming.decode)
            if tracer is not None:
                tracer.span(
                    "unpack" if incoming.decode is None else "decode", began, self.operation.keys, self.parcel.nbytes
                )
        return self.asker.noted(self.parcel, reply, self._sent, incoming is not None)

    @property
    def traced(self) -> tuple[str, Sequence[Key], int]:
        """See ``PendingRequest``."""
        return self.operation.what, self.operation.keys, self.parcel.nbytes

    def forsake(self) -> None:
        """See ``PendingRequest``."""
        self.incoming = None

    @property
    def _sent(self) -> int:
        return 0

    def _is_noted(self, tracer: Tracer) -> bool:
        """Whether a trace shows how long it takes to copy the values, or to encode them."""
        return tracer.open and self.parcel.nbytes >= WORTH_NOTING


class PullOfArrays(_ArrayRequest):
    """The values that include this worker's contributions so far."""

    __slots__ = ()

    def __init__(
        self, asker: ArrayAsker, operation: Operation, parcel: Parcel, incoming: IncomingParcel | None
    ) -> None:
        super().__init__(asker, operation, parcel, asker.clocks.of(parcel), incoming, None)

    def message(self, sender: wire.Sender) -> wire.Pull:
        """See ``PendingRequest``."""
        return wire.Pull(sender, self.asker.store, self.parcel.ids, self.clocks, self.codec)

    def forsake(self) -> None:
        """See ``PendingRequest``. Whether the pull fails does not matter any more, either."""
        super().forsake()
        self.operation.raised = True


class PushOfArrays(_ArrayRequest):
    """This worker's contribution to a parcel's segments. Its values are packed, or encoded, when it is sent."""

    __slots__ = ("contribution", "sent", "want")
    early = False

    def __init__(
        self,
        asker: ArrayAsker,
        operation: Operation,
        parcel: Parcel,
        incoming: IncomingParcel | None,
        contribution: PushedValues,
    ) -> None:
        super().__init__(asker, operation, parcel, asker.clocks.after(parcel), incoming, contribution.order)
        self.contribution = contribution
        self.want = incoming is not None
        self.sent = 0  # bytes of gradients

    def message(self, sender: wire.Sender) -> wire.Push | wire.PushLent:
        """See ``PendingRequest``."""
        gather = self.turn is not None and self.asker.session.client.gathers(self.peer)
        load, hyper, order = self.contribution
        tracer = self.asker.session.tracer
        if tracer is not None and not self._is_noted(tracer):
            tracer = None
        began = 0.0 if tracer is None else tracer.clock()
        buffers, codec, lengths, segment_counts, encode, in_float32 = load.pack(self.parcel, gather)
        if tracer is not None:
            tracer.span("pack" if codec is None else "encode", began, self.operation.keys, self.parcel.nbytes)
        plain = self.parcel.sum_bytes if in_float32 else self.parcel.nbytes
        self.sent = plain if codec is None else sum(lengths)
        return wire.Push(
            sender,
            store=self.asker.store,
            ids=self.parcel.ids,
            clocks=self.clocks,
            want=self.want,
            lr=hyper.lr,
            rescale=hyper.rescale,
            codec=codec,
            lengths=list(lengths),
            segment_counts=list(segment_counts),
            back=self.codec,
            changes=hyper.changes,
            priority=order,
            encode=encode,
            in_float32=in_float32,
            buffers=buffers,
        )

    @property
    def _sent(self) -> int:
        return self.sent


class PushOfLentArrays(PushOfArrays):
    """A contribution that the aggregator reads from memory of this worker's device."""

    __slots__ = ()

    def message(self, sender: wire.Sender) -> wire.PushLent:
        """See ``PendingRequest``."""
        push, load = super().message(sender), self.contribution.load
        if not isinstance(push, wire.Push) or not isinstance(load, LentLoad):
            raise AssertionError("a push of lent memory without any")
        return wire.PushLent.of(push, load.loan(self.parcel))


class RowCall(NamedTuple):
    """Tables that share their messages, one for each server.

    Attributes:
        plan: of the tables.
        contribution: the rows to push; None to push nothing.
        reader: takes the rows that come back; None if none are wanted.
    """

    plan: RowPlan
    contribution: OutgoingRows | None
    reader: RowReader | None


class Noted(Protocol):
    """Returns the effect of an answer on the counters and clocks."""

    def __call__(self, parcel: RowParcel, reply: wire.Ack | wire.Rows, pushed: int, pulled: bool) -> Effect:
        """See ``Pushes.noted``."""
        ...


class RowAsker(NamedTuple):
    """What all requests for rows of a store have in common.

    Attributes:
        store: its number.
        servers: who is asked: always the servers themselves, since aggregators know no tables.
        clocks: of this worker's keys.
        memory: messages are built in it.
        noted: see ``Noted``.
    """

    store: int
    servers: Sequence[Peer]
    clocks: PushClocks
    memory: Memory
    noted: Noted


class RowNumbers(NamedTuple):
    """The numbers of a push that all its messages have: hyper-parameters, and the order among other messages."""

    lr: float | None
    rescale: float | None
    changes: list[list[Any]]
    order: int | None


class _RowRequest(PendingRequest):
    """A request about the stripes that one server has; ``reader`` is None where no rows are wanted, or no longer.

    Args:
        operation: that it is a part of.
        asker: of the store.
        call: what the operation has of these tables.
        server: which of the call's parcels it is about.
        clocks: of the tables.
        priority, turn: see ``PendingRequest``.
    """

    __slots__ = ("asker", "call", "clocks", "parcel", "reader")

    def __init__(
        self,
        operation: Operation,
        asker: RowAsker,
        call: RowCall,
        server: int,
        clocks: list[int],
        priority: int | None,
        turn: Turn | None,
    ) -> None:
        super().__init__(asker.servers[server], operation, priority, turn)
        self.asker, self.call = asker, call
        self.parcel = call.plan.parcels[server]
        self.clocks = clocks
        self.reader = call.reader

    def take(self, reply: Any) -> Effect:
        """See ``PendingRequest``."""
        reader = self.reader
        if reader is not None:
            reader.take(self.parcel, reply)
        return self.asker.noted(self.parcel, reply, self._sent, reader is not None)

    def forsake(self) -> None:
        """See ``PendingRequest``."""
        self.reader = None

    @property
    def _sent(self) -> int:
        return 0


class PullOfRows(_RowRequest):
    """The rows that include this worker's contributions so far; see ``_RowRequest``."""

    __slots__ = ("counts", "ids")

    def __init__(
        self,
        operation: Operation,
        asker: RowAsker,
        call: RowCall,
        server: int,
        reader: RowReader,
        priority: int,
    ) -> None:
        clocks = asker.clocks.of(call.plan.parcels[server])
        turn = Turn(reader.nbytes(server), priority)
        super().__init__(operation, asker, call, server, clocks, None, turn)
        self.counts, self.ids = reader.counts(server), reader.ids(server)

    def message(self, sender: wire.Sender) -> wire.PullRows:
        """See ``PendingRequest``."""
        return wire.PullRows(
            sender,
            store=self.asker.store,
            ids=self.parcel.ids,
            clocks=self.clocks,
            wanted=self.counts,
            wide=self.call.plan.wide,
            codecs=self.call.plan.codecs,
            buffers=[sendable(self.ids, self.asker.memory)],
        )

    def forsake(self) -> None:
        """See ``PendingRequest``. Whether the pull fails does not matter any more, either."""
        super().forsake()
        self.operation.raised = True


class PushOfRows(_RowRequest):
    """This worker's contribution to the stripes of a parcel. The rows are copied, or encoded, when it is sent."""

    __slots__ = ("contribution", "counts", "ids", "numbers", "sent", "union", "want")
    early = False

    def __init__(
        self,
        operation: Operation,
        asker: RowAsker,
        call: RowCall,
        server: int,
        contribution: OutgoingRows,
        numbers: RowNumbers,
        priority: int | None,
    ) -> None:
        parcel, reader = call.plan.parcels[server], call.reader
        turn = None if reader is None or priority is None else Turn(reader.nbytes(server), priority)
        order = numbers.order if turn is None else None
        super().__init__(operation, asker, call, server, asker.clocks.after(parcel), order, turn)
        self.contribution, self.numbers = contribution, numbers
        self.want = reader is not None
        self.union = reader is not None and reader.union
        self.counts = [0] * len(parcel.ids) if reader is None else reader.counts(server)
        self.ids = None if reader is None else reader.ids(server)
        self.sent = 0  # bytes of gradients

    def message(self, sender: wire.Sender) -> wire.PushRows:
        """See ``PendingRequest``."""
        server, memory, numbers = self.parcel.server, self.asker.memory, self.numbers
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
            wide=self.call.plan.wide,
            want=self.want,
            union=self.union,
            lr=numbers.lr,
            rescale=numbers.rescale,
            changes=numbers.changes,
            codecs=self.call.plan.codecs,
            priority=numbers.order,
            buffers=[pushed, rows, wanted],
        )

    @property
    def _sent(self) -> int:
        return self.sent


def pushes_of_rows(
    asker: RowAsker,
    operation: Operation,
    calls: Sequence[RowCall],
    numbers: RowNumbers,
    priority: int | None,
) -> list[PendingRequest]:
    """Return a push to each server, even of no rows: it counts as this worker's contribution to the round.

    Args:
        priority: of those whose rows are waited for; they wait for their turn. None: they go at once.
    """
    return [
        PushOfRows(operation, asker, call, server, call.contribution, numbers, priority)
        for call in calls
        if call.contribution is not None
        for server in range(len(asker.servers))
    ]


def pulls_of_rows(
    asker: RowAsker, operation: Operation, calls: Sequence[RowCall], priority: int
) -> list[PendingRequest]:
    """Return a pull from each server that has rows that are wanted."""
    return [
        PullOfRows(operation, asker, call, server, call.reader, priority)
        for call in calls
        if call.reader is not None
        for server in call.reader.servers
    ]
