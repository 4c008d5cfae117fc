"""What one call has of tables, and the requests that push and pull its rows, until they are answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from kvstore import wire
from kvstore.client.clocks import PushClocks
from kvstore.client.rows.incoming_rows import RowReader
from kvstore.client.rows.outgoing_rows import OutgoingRows
from kvstore.client.rows.plan import RowParcel, RowPlan
from kvstore.member.outstanding import Effect, PendingRequest, Turn
from kvstore.ticket import Operation
from kvstore.transport import Peer
from kvstore.transport.memory import SMALL, Memory


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


def room(nbytes: int, memory: Memory) -> memoryview:
    """Return memory for so many bytes of a message."""
    return memoryview(bytearray(nbytes)) if nbytes < SMALL else memory.allocate(nbytes)


def sendable(array: Any, memory: Memory) -> wire.Buffer:
    """Return a copy of the bytes of a contiguous array, in memory that messages are built in."""
    if array.nbytes < 2 * SMALL:  # so few are copied into the socket, too
        return bytes(array.data)
    buffer = memory.allocate(array.nbytes)
    buffer[:] = array.reshape(-1).view("u1").data
    return buffer
