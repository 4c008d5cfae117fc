"""Pushes and pulls: contributions go out, values come in, and the worker's clocks advance.

A push is one transaction. Everything that can be wrong with it is found before anything changes. Then its clocks and
its requests are noted in one step, and from there on it is made, whatever happens to the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from kvstore import wire
from kvstore.client.calls import StoreCall
from kvstore.client.compression import Compressing, encoded_here
from kvstore.client.entries import PushClocks
from kvstore.client.lending import Lending, LentLoad
from kvstore.client.optimizing import Optimizing, PushNumbers
from kvstore.client.pack import Load, OutgoingRows, room, sendable
from kvstore.client.plans import Parcel, Plan, RowParcel
from kvstore.client.requests import Joining, Requests
from kvstore.client.row_calls import ArrayRowsCall, RowCall
from kvstore.client.unpack import RowReader, Writer
from kvstore.errors import UsageError
from kvstore.member.activity import StoreActivity
from kvstore.member.outstanding import Effect, PendingRequest, Turn
from kvstore.rows.row_sparse import require_uncompressed
from kvstore.rule import Rule
from kvstore.spec import Key, require_floats
from kvstore.ticket import Operation
from kvstore.transport import Peer
from kvstore.transport.memory import whole
from kvstore.values import Leaving
from kvstore.values.any_arrays import Column

WORTH_NOTING = 64 << 10  # bytes; copies of fewer take less time than it takes to note them

Answer: TypeAlias = wire.Ack | wire.Rows | wire.Values
Read: TypeAlias = Callable[
    [Any, Any], None
]  # takes a parcel and its answer, and writes the values to the caller's arrays


class Counts(NamedTuple):
    """How much has been pushed and pulled so far.

    A change makes new counts, which replace the old ones in one step. An exception cannot leave a mixture of both.
    """

    pushes: int = 0  # pushes, pulls: keys, counted once for each call that had them
    pulls: int = 0
    bytes_pushed: int = 0  # bytes_pushed, bytes_pulled: bytes of values that answered messages have carried
    bytes_pulled: int = 0
    late: int = 0  # segments of pushes that came after their rounds were over
    staleness: tuple[tuple[int, int], ...] = ()  # how often a read was so many pushes ahead of the slowest worker
    ahead: int = 0  # how many the last read was

    def called(self, pushes: int, pulls: int) -> Counts:
        return Counts(self.pushes + pushes, self.pulls + pulls, *self[2:])

    def sent(self, nbytes: int, reply: wire.Ack | wire.Rows | wire.Values, quorum: bool) -> Counts:
        """Return the counts after the answer to a message that carried ``nbytes`` of gradients."""
        pushes, pulls, bytes_pushed, bytes_pulled, late, staleness, ahead = self
        late += reply.missed if quorum else 0
        return Counts(pushes, pulls, bytes_pushed + nbytes, bytes_pulled, late, staleness, ahead)

    def received(self, nbytes: int, ahead: int | None) -> Counts:
        """Return the counts after values of ``nbytes`` came, read ``ahead`` of the slowest; None without a bound."""
        pushes, pulls, bytes_pushed, bytes_pulled, late, staleness, before = self
        if ahead is not None:
            times = dict(staleness)
            times[ahead] = times.get(ahead, 0) + 1
            staleness = tuple(times.items())
        now = before if ahead is None else ahead
        return Counts(pushes, pulls, bytes_pushed, bytes_pulled + nbytes, late, staleness, now)


class Pushes:
    """The pushes and pulls of one store."""

    def __init__(
        self,
        requests: Requests,
        rule: Rule,
        clocks: PushClocks,
        optimizing: Optimizing,
        joining: Joining,
    ) -> None:
        # how values are encoded, here or by the aggregator; None leaves them as they are
        self.compressing: Compressing | None = None
        self.lending: Lending | None = None  # lends gradients on devices to the aggregator; None where nothing is lent
        self.counts = Counts()
        # called with the places of a push's keys before anything of the push is made
        self.before: list[Callable[[Column], object]] = []
        self.session = session = requests.session
        self.requests = requests
        self.rule = rule
        self.clocks = clocks
        self._client = session.client
        self._optimizing = optimizing
        self._joining = joining
        self._number = 0  # of the last push
        self._pushed: dict[int, Operation] = {}  # by number, those that may not have taken effect yet
        self._failed: dict[Operation, None] = {}

    @property
    def outstanding(self) -> int:
        return sum(1 for operation in list(self._pushed.values()) if operation.open)

    @property
    def bytes_pushed(self) -> int:
        sent = sum(request.sent for request in self._client.of(StoreRequest) if request.pushes is self)
        return self.counts.bytes_pushed + sent

    def activity(self) -> StoreActivity:
        """Return what this worker has done in the store, for its reports. Any thread may call it."""
        return StoreActivity(int(self.clocks.pushed.max(initial=0)), self.counts.ahead)

    def make(self, what: str, call: StoreCall, priority: int, wait: bool) -> Operation:
        """Make ``call``: send this worker's next contribution, ask for the values after it, or both.

        Args:
            what: the name of the call, for messages.
            priority: of its messages among those that wait to be sent; but no push overtakes another of the same key.
            wait: return when it has taken effect. Until then messages may wait for their turn, and read the values when
                they leave.
        """
        tracer = self.session.tracer
        began = 0.0 if tracer is None else tracer.clock()
        if self.before and call.pushes:
            for hook in self.before:
                hook(call.places)
        load = self._load(call) if call.pushes else None
        operation = Operation(what, call.keys, self._client, self._fail, self.requests.limits)
        # The requests are not made here but by ``_prepare``, which the client calls alone at the links; it notes the
        # effect together with them. A signal's handler may raise between any two lines: clocks that advanced without
        # their requests, or requests without their clocks, would leave this worker out of step with all others.
        send = self._client.exchange if wait else self._client.submit
        send(operation, self._prepare, call, load, priority, wait)
        if tracer is not None and tracer.open:
            tracer.span(what, began, call.keys)
        return operation

    def _load(self, call: StoreCall) -> Load | None:
        """Return the contents of the messages of a push, as far as they are of arrays."""
        if self.rule.mode == "async":
            self._optimizing.require("push")
        if call.some is not None:
            self._require_some_rows(call.some.plan)
        plan, values = call.plan, call.values
        if plan is None or values is None:
            return None
        if not plan.floats and self._optimizing.optimizer is not None:
            require_floats(zip(plan.keys, plan.specs, strict=True))
        if self.compressing is None:
            lent = None if self.lending is None else self.lending.load(plan, values)
            return self.requests.packer.plain(Leaving(values)) if lent is None else lent
        return self.compressing.load(plan, values, self.requests.packer)

    def _require_some_rows(self, plan: Plan) -> None:
        if self._optimizing.optimizer is not None:
            require_floats(zip(plan.keys, plan.specs, strict=True))
        if self.compressing is not None:
            require_uncompressed(plan.keys)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every push has taken effect; raise what has gone wrong."""
        self._client.wait_all(list(self._pushed.values()), timeout)
        self.check()

    def check(self) -> None:
        """Raise what has gone wrong since the last call."""
        self.session.check(self.requests.store)
        for operation in list(self._failed):  # a copy: an answer that comes meanwhile may add one
            if not operation.raised:
                operation.wait()
            # Only now: an exception before this line leaves the error here, for the next call to raise.
            self._failed.pop(operation, None)

    # ---- alone at the links

    def _prepare(
        self, operation: Operation, call: StoreCall, load: Load | None, priority: int, wait: bool
    ) -> tuple[Sequence[PendingRequest], Effect]:
        """Return the requests of ``call``, and what is to change when they are made."""
        priority = max(-wire.MAX_PRIORITY, min(int(priority), wire.MAX_PRIORITY))
        if not call.pushes:
            return self._pulls(operation, call, priority), partial(self._note, self.counts.called(0, len(call.keys)))
        if self._joining.under_way:
            raise UsageError(
                "join() is not finished: other workers have not called it yet. Call join() again to keep waiting"
            )
        if (call.rows or call.some is not None) and self._optimizing.weight is not None:
            raise UsageError("weights are for whole arrays: push rows outside of weighted()")
        self._forget()
        places = call.places
        # Nothing is changed from here on: an exception, of memory say, leaves the call not made. All changes are in the
        # effect, which is returned with values that are computed already, because it may have to run twice.
        # The pushes of a key stay in order, and so do their answers, which may go into the same array.
        order = None if self._on_way(places) else priority
        numbers = self._optimizing.numbers(order)
        turn = priority if wait else None
        pushes: list[PendingRequest] = []
        if call.plan is not None and load is not None:
            pushes += [
                PushOfArrays(
                    self, operation, parcel, self._incoming(call.plan, parcel, call.writer, turn), load, numbers
                )
                for parcel in call.plan.parcels
            ]
        # Each server gets a push of rows, even of none: it counts as this worker's contribution to the round, which no
        # server would close otherwise.
        pushes += [
            PushOfRows(self, operation, rows, server, rows.contribution, numbers, turn)
            for rows in call.rows
            if rows.contribution is not None
            for server in range(rows.plan.servers)
        ]
        if call.some is not None:
            pushes += self._some_rows(operation, call.some, numbers, turn)
        read = sum(len(rows.plan.keys) for rows in call.rows if rows.reader is not None)
        if call.plan is not None and call.writer is not None:
            read += len(call.plan.keys)
        if call.some is not None and call.some.writer is not None:
            read += len(call.some.plan.keys)
        counts = self.counts.called(len(places), read)
        return pushes, partial(self._made, self._number + 1, operation, places, self.clocks.pushed[places] + 1, counts)

    def _some_rows(
        self, operation: Operation, call: ArrayRowsCall, numbers: PushNumbers, turn: int | None
    ) -> list[PendingRequest]:
        """Return what pushes some rows of arrays, and what then asks for their new values, if these are wanted.

        These come piece by piece, as those of all arrays do, and not in one answer for each server.
        """
        pushes: list[PendingRequest] = [
            PushOfArrays(self, operation, parcel, IncomingParcel(), call.rows.load, numbers)
            for parcel in call.plan.parcels
        ]
        if call.pulled is None:
            return pushes
        pulls = [
            PullOfArrays(
                self,
                operation,
                parcel,
                self._incoming(call.pulled, parcel, call.writer, turn),
                self.clocks.after(parcel.places),
            )
            for parcel in call.pulled.parcels
        ]
        return [*pushes, *pulls]

    def _pulls(self, operation: Operation, call: StoreCall, priority: int) -> list[PendingRequest]:
        pulls: list[PendingRequest] = []
        turn = priority if self.session.aggregator is None else None  # an aggregator decides what goes next
        if call.plan is not None:
            pulls += [
                PullOfArrays(self, operation, parcel, self._incoming(call.plan, parcel, call.writer, turn))
                for parcel in call.plan.parcels
            ]
        pulls += [
            PullOfRows(self, operation, rows, server, rows.reader, priority)
            for rows in call.rows
            if rows.reader is not None
            for server in rows.reader.servers
        ]
        return pulls

    def _made(self, number: int, operation: Operation, places: Column, clocks: Column, counts: Counts) -> None:
        # May run twice, as every effect may: ``clocks`` are set, not advanced by one.
        self.clocks.note(places, clocks, number)
        if self.session.tracer is not None and len(clocks):
            self.session.tracer.reached(int(clocks[0]))
        self._pushed[number] = operation
        self._number = number
        self.counts = counts

    def _on_way(self, places: Column) -> bool:
        """Whether the last push of one of the keys at ``places`` has not taken effect yet."""
        if not self._pushed:
            return False
        numbers = set(self.clocks.last[places].tolist())
        return any(number in self._pushed and self._pushed[number].open for number in numbers)

    def _forget(self) -> None:
        """Forget the oldest pushes, as far as they have taken effect."""
        # Not all that have: a push then costs no look at each of those that a slow server has left open.
        for number, operation in list(self._pushed.items()):
            if operation.open:
                return
            self._pushed.pop(number, None)

    def _incoming(self, plan: Plan, parcel: Parcel, writer: Writer | None, priority: int | None) -> IncomingParcel:
        """Return how the values of a ``parcel`` come; their request waits for its turn if it has a ``priority``."""
        if writer is None:
            return IncomingParcel()
        how = self.compressing
        read: Read = writer.take
        codec, nbytes = None, parcel.nbytes
        if how is not None:
            codec, nbytes = how.asked(parcel), nbytes // how.fold
            if (decode := how.decoder(parcel)) is not None:
                read = partial(writer.take, decode=decode)
        return IncomingParcel(read, codec, None if priority is None else Turn(int(plan.weight * nbytes), priority))

    def answered(self, parcel: Parcel | RowParcel, reply: Answer, pushed: int, pulled: bool) -> Effect:
        """Return the effect of an answer on the counters and clocks.

        ``pushed`` bytes of gradients went out, and values have been written if ``pulled``.
        """
        counts = self.counts.sent(pushed, reply, self.rule.quorum is not None)
        versions: Sequence[int] = ()
        if pulled and not isinstance(reply, wire.Ack):
            # Of a table no parcel knows how many bytes come: the server says how many rows there are.
            nbytes = sum(map(len, reply.buffers)) if isinstance(reply, wire.Rows) else sum(reply.lengths)
            counts = counts.received(nbytes or parcel.nbytes, reply.ahead if self.rule.mode == "async" else None)
            versions = reply.clocks
        return partial(self._note, counts, parcel, versions)

    def _note(self, counts: Counts, parcel: Parcel | RowParcel | None = None, versions: Sequence[int] = ()) -> None:
        # May run twice, too: it sets counts that were computed before, and adds nothing.
        if versions and parcel is not None:
            self.clocks.advance(parcel.segments, parcel.entries, versions)
        self.counts = counts

    def _fail(self, operation: Operation) -> None:
        self._failed[operation] = None


# ---- the requests, until they are answered


class StoreRequest(PendingRequest):
    """A push or a pull of the segments of one message.

    The message is built from these fields, and is the same each time, because it is resent after a link was lost.
    """

    __slots__ = ("clocks", "parcel", "pushes", "read", "sent")
    reads_only = False

    def __init__(
        self,
        pushes: Pushes,
        peer: Peer,
        operation: Operation,
        parcel: Parcel | RowParcel,
        clocks: list[int],
        read: Read | None,
        order: int | None = None,
        turn: Turn | None = None,
    ) -> None:
        super().__init__(peer, operation, order if turn is None else None, turn)
        self.pushes, self.parcel, self.clocks = pushes, parcel, clocks
        self.read = read  # None where no values are wanted, or no longer
        self.sent = 0  # bytes of gradients that the message carries; 0 until it is made

    def take(self, reply: Any) -> Effect:
        read = self.read
        if read is not None:
            tracer = self.pushes.session.tracer
            if tracer is None or not tracer.open or self.parcel.nbytes < WORTH_NOTING:
                read(self.parcel, reply)
            else:
                began = tracer.clock()
                read(self.parcel, reply)
                what = "decode" if isinstance(read, partial) else "unpack"
                tracer.span(what, began, self.operation.keys, self.parcel.nbytes)
        return self.pushes.answered(self.parcel, reply, self.sent, read is not None)

    @property
    def traced(self) -> tuple[str, Sequence[Key], int]:
        return self.operation.what, self.operation.keys, self.parcel.nbytes

    def forsake(self) -> None:
        self.read = None
        if self.reads_only:
            self.operation.raised = True  # an error of a pull whose caller has gone is nobody's, either


class IncomingParcel(NamedTuple):
    """How the values of a parcel come."""

    read: Read | None = None
    codec: wire.CodecDescription = None  # the encoding that they are to come in
    turn: Turn | None = None  # when they may be asked for


class PullOfArrays(StoreRequest):
    """The values that include this worker's contributions so far."""

    __slots__ = ("codec",)
    reads_only = True

    def __init__(
        self,
        pushes: Pushes,
        operation: Operation,
        parcel: Parcel,
        incoming: IncomingParcel,
        clocks: list[int] | None = None,
    ) -> None:
        read, self.codec, turn = incoming
        peer = pushes.session.carrier(parcel.server)
        clocks = pushes.clocks.of(parcel.places) if clocks is None else clocks
        super().__init__(pushes, peer, operation, parcel, clocks, read, turn=turn)

    def bypass(self) -> Peer:
        return self.pushes.session.servers[self.parcel.server]

    def message(self, sender: wire.Sender) -> wire.Pull:
        return wire.Pull(sender, self.pushes.requests.store, self.parcel.ids, self.clocks, self.codec)


class PushOfArrays(StoreRequest):
    """This worker's contribution to a parcel's segments. Its values are packed, or encoded, when it is sent."""

    __slots__ = ("codec", "load", "numbers", "want")
    parcel: Parcel
    early = False  # made before, it would need a copy of arrays that a waiting caller leaves as they are

    def __init__(
        self,
        pushes: Pushes,
        operation: Operation,
        parcel: Parcel,
        incoming: IncomingParcel,
        load: Load,
        numbers: PushNumbers,
    ) -> None:
        # Both are kept apart from ``read``: a message may be made once nobody reads its answer, and must be the same.
        self.want = incoming.read is not None
        self.codec = incoming.codec
        self.load = load
        self.numbers = numbers
        clocks = pushes.clocks.after(parcel.places)
        peer = pushes.session.carrier(parcel.server)
        super().__init__(pushes, peer, operation, parcel, clocks, incoming.read, numbers.order, incoming.turn)

    def message(self, sender: wire.Sender) -> wire.Push | wire.PushLent:
        session, parcel = self.pushes.session, self.parcel
        # Arrays are sent from where they lie only while the caller waits, that is, with a turn.
        gather = self.turn is not None and session.client.gathers(self.peer)
        tracer = session.tracer
        if tracer is not None and not (tracer.open and parcel.nbytes >= WORTH_NOTING):
            tracer = None
        began = 0.0 if tracer is None else tracer.clock()
        buffers, codec, lengths, segment_counts, encode, in_float32, loan, runs = self.load(parcel, gather)
        if tracer is not None:
            tracer.span("pack" if codec is None else "encode", began, self.operation.keys, parcel.nbytes)
        plain = parcel.sum_bytes if in_float32 else parcel.nbytes
        if runs:
            plain = sum(map(len, buffers))
        self.sent = plain if codec is None else sum(lengths)
        lr, rescale, changes, order, weight = self.numbers
        push = wire.Push(
            sender,
            store=self.pushes.requests.store,
            ids=parcel.ids,
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
            weight=weight,
            encode=encode,
            in_float32=in_float32,
            runs=list(runs),
            buffers=buffers,
        )
        if loan is None:
            return push
        if isinstance(self.load, LentLoad) and session.aggregator is None:
            return wire.PushLent.of(push, loan).plain(self.load.copied(parcel))
        return wire.PushLent.of(push, loan)

    def bypass(self) -> Peer:
        if isinstance(self.load, LentLoad):
            self.frames = None  # the values are still where they were lent
        elif self.frames is not None:
            push = wire.decode(list(map(whole, self.frames)))
            if isinstance(push, wire.Push):
                self.frames = wire.encode(encoded_here(push, self.parcel))
        return self.pushes.session.servers[self.parcel.server]


# Requests about rows go to the server itself: aggregators know no tables.


class PullOfRows(StoreRequest):
    """The rows that include this worker's contributions so far."""

    __slots__ = ("counts", "ids", "plan")
    reads_only = True

    def __init__(
        self, pushes: Pushes, operation: Operation, call: RowCall, server: int, reader: RowReader, priority: int
    ) -> None:
        self.plan = call.plan
        self.counts, self.ids = reader.counts(server), reader.ids(server)
        parcel, turn = call.plan.parcels[server], Turn(reader.nbytes(server), priority)
        clocks = pushes.clocks.of(parcel.places)
        super().__init__(pushes, pushes.session.servers[server], operation, parcel, clocks, reader.take, turn=turn)

    def message(self, sender: wire.Sender) -> wire.PullRows:
        return wire.PullRows(
            sender,
            store=self.pushes.requests.store,
            ids=self.parcel.ids,
            clocks=self.clocks,
            wanted=self.counts,
            wide=self.plan.wide,
            codecs=self.plan.codecs,
            buffers=[sendable(self.ids, self.pushes.session.client)],
        )


class PushOfRows(StoreRequest):
    """This worker's contribution to the stripes of a parcel. The rows are copied, or encoded, when it is sent.

    Args:
        priority: of its turn, if its rows are waited for; None: it goes at once.
    """

    __slots__ = ("contribution", "counts", "ids", "numbers", "plan", "union", "want")
    early = False

    def __init__(
        self,
        pushes: Pushes,
        operation: Operation,
        call: RowCall,
        server: int,
        contribution: OutgoingRows,
        numbers: PushNumbers,
        priority: int | None,
    ) -> None:
        self.plan, self.contribution, self.numbers = call.plan, contribution, numbers
        parcel, reader = call.plan.parcels[server], call.reader
        self.want = reader is not None
        self.union = reader is not None and reader.union
        self.counts = [0] * len(parcel.ids) if reader is None else reader.counts(server)
        self.ids = None if reader is None else reader.ids(server)
        super().__init__(
            pushes,
            pushes.session.servers[server],
            operation,
            parcel,
            pushes.clocks.after(parcel.places),
            None if reader is None else reader.take,
            numbers.order,
            None if reader is None or priority is None else Turn(reader.nbytes(server), priority),
        )

    def message(self, sender: wire.Sender) -> wire.PushRows:
        server, memory = self.parcel.server, self.pushes.session.client
        lr, rescale, changes, order, _ = self.numbers
        ids = self.contribution.striped.ids(server)
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
            store=self.pushes.requests.store,
            ids=self.parcel.ids,
            clocks=self.clocks,
            counts=self.contribution.striped.counts[server],
            wanted=self.counts,
            wide=self.plan.wide,
            want=self.want,
            union=self.union,
            lr=lr,
            rescale=rescale,
            changes=changes,
            codecs=self.plan.codecs,
            priority=order,
            in_float32=self.contribution.in_float32,
            buffers=[pushed, rows, wanted],
        )
