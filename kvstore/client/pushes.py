"""Pushes and pulls: contributions go out, values come in, and the worker's clocks advance.

A push is one transaction. Everything that can be wrong with it is found before anything changes. Then its clocks and
its requests are noted in one step, and from there on it is made, whatever happens to the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, cast

from kvstore import wire
from kvstore.client.calls import StoreCall
from kvstore.client.compression import Compressing, Delegated
from kvstore.client.entries import Carried, PushClocks
from kvstore.client.lending import Lending
from kvstore.client.optimizing import Optimizing
from kvstore.client.pack import Load
from kvstore.client.pending import (
    Asker,
    IncomingParcel,
    PullOfArrays,
    PullOfRows,
    PushOfArrays,
    PushOfRows,
    StoreRequest,
)
from kvstore.client.plans import Parcel, Plan
from kvstore.client.requests import Joining, Requests
from kvstore.client.unpack import Writer
from kvstore.errors import UsageError
from kvstore.member.activity import StoreActivity
from kvstore.member.outstanding import Effect, PendingRequest, Turn
from kvstore.rule import Rule
from kvstore.spec import require_floats
from kvstore.ticket import Operation
from kvstore.values import Leaving
from kvstore.values.any_arrays import Column


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
    """The pushes and pulls of one store.

    Args:
        joining: whether this worker may push.
    """

    def __init__(
        self,
        requests: Requests,
        rule: Rule,
        clocks: PushClocks,
        optimizing: Optimizing,
        joining: Joining,
    ) -> None:
        # how values are encoded, here or by the aggregator; None leaves them as they are
        self.compressing: Compressing | Delegated | None = None
        self.lending: Lending | None = None  # lends gradients on devices to the aggregator; None where nothing is lent
        self.counts = Counts()
        # called with the places of a push's keys before anything of the push is made; None for nothing
        self.before: Callable[[Column], None] | None = None
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
        self._asker = Asker(requests.store, session, clocks, self._answered)

    @property
    def outstanding(self) -> int:
        return sum(1 for operation in list(self._pushed.values()) if operation.open)

    @property
    def bytes_pushed(self) -> int:
        sent = sum(request.sent for request in self._client.of(StoreRequest) if request.asker is self._asker)
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
        if self.before is not None and call.pushes:
            self.before(call.places)
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
        plan, values = call.plan, call.values
        if plan is None or values is None:
            return None
        if not plan.floats and self._optimizing.optimizer is not None:
            require_floats(zip(plan.keys, plan.specs, strict=True))
        if self.compressing is None:
            lent = None if self.lending is None else self.lending.load(plan, values)
            return self.requests.packer.plain(Leaving(values)) if lent is None else lent
        return self.compressing.load(plan, values, self.requests.packer)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every push has taken effect; raise what has gone wrong."""
        self._client.wait_all(list(self._pushed.values()), timeout)
        self.check()

    def check(self) -> None:
        """Raise what has gone wrong since the last call."""
        self.session.check(self.requests.store)
        for operation in list(self._failed):
            if not operation.raised:
                operation.wait()
            self._failed.pop(operation, None)

    # ---- alone at the links

    def _prepare(
        self, operation: Operation, call: StoreCall, load: Load | None, priority: int, wait: bool
    ) -> tuple[Sequence[PendingRequest], Effect]:
        """Return the requests of ``call``, and what is to change when they are made."""
        priority = max(-wire.MAX_PRIORITY, min(int(priority), wire.MAX_PRIORITY))
        if not call.pushes:
            return self._pulls(operation, call, priority), partial(self._count, self.counts.called(0, len(call.keys)))
        if self._joining.under_way:
            raise UsageError("this worker has joined, and others have not yet: call join() again, which waits on")
        self._forget()
        places = call.places
        # The pushes of a key stay in order, and so do their answers, which may go into the same array.
        order = None if self._on_way(places) else priority
        numbers = self._optimizing.numbers(order)
        turn = priority if wait else None
        pushes: list[PendingRequest] = []
        if call.plan is not None and load is not None:
            pushes += [
                PushOfArrays(
                    self._asker, operation, parcel, self._incoming(call.plan, parcel, call.writer, turn), load, numbers
                )
                for parcel in call.plan.parcels
            ]
        # Each server gets a push of rows, even of none: it counts as this worker's contribution to the round.
        pushes += [
            PushOfRows(self._asker, operation, rows, server, rows.contribution, numbers, turn)
            for rows in call.rows
            if rows.contribution is not None
            for server in range(rows.plan.servers)
        ]
        read = sum(len(rows.plan.keys) for rows in call.rows if rows.reader is not None)
        if call.plan is not None and call.writer is not None:
            read += len(call.plan.keys)
        counts = self.counts.called(len(places), read)
        return pushes, partial(self._made, self._number + 1, operation, places, self.clocks.pushed[places] + 1, counts)

    def _pulls(self, operation: Operation, call: StoreCall, priority: int) -> list[PendingRequest]:
        pulls: list[PendingRequest] = []
        turn = priority if self.session.aggregator is None else None  # an aggregator decides what goes next
        if call.plan is not None:
            pulls += [
                PullOfArrays(self._asker, operation, parcel, self._incoming(call.plan, parcel, call.writer, turn))
                for parcel in call.plan.parcels
            ]
        pulls += [
            PullOfRows(self._asker, operation, rows, server, rows.reader, priority)
            for rows in call.rows
            if rows.reader is not None
            for server in rows.reader.servers
        ]
        return pulls

    def _made(self, number: int, operation: Operation, places: Column, clocks: Column, counts: Counts) -> None:
        self.clocks.note(places, clocks, number)
        if self.session.tracer is not None and len(clocks):
            self.session.tracer.reached(int(clocks[0]))
        self._pushed[number] = operation
        self._number = number
        self.counts = counts

    def _count(self, counts: Counts) -> None:
        self.counts = counts

    def _on_way(self, places: Column) -> bool:
        """Whether the last push of one of the keys at ``places`` has not taken effect yet."""
        if not self._pushed:
            return False
        numbers = set(self.clocks.last[places].tolist())
        return any(number in self._pushed and self._pushed[number].open for number in numbers)

    def _forget(self) -> None:
        """Forget the oldest pushes, as far as they have taken effect."""
        for number, operation in list(self._pushed.items()):
            if operation.open:
                return
            self._pushed.pop(number, None)

    def _incoming(
        self, plan: Plan, parcel: Parcel, writer: Writer | None, priority: int | None
    ) -> IncomingParcel | None:
        """Return how the values of a ``parcel`` come; their request waits for its turn if it has a ``priority``."""
        if writer is None:
            return None
        how = self.compressing
        if how is None:
            decode, codec, nbytes = None, None, parcel.nbytes
        else:
            decode, codec, nbytes = how.decoder(parcel), how.asked(parcel), parcel.nbytes // how.fold
        turn = None if priority is None else Turn(int(plan.weight * nbytes), priority)
        return IncomingParcel(writer, decode, codec, turn)

    def _answered(
        self, parcel: Carried, reply: wire.Ack | wire.Rows | wire.Values, pushed: int, pulled: bool
    ) -> Effect:
        """Return the effect of an answer on the counters and clocks."""
        counts = self.counts.sent(pushed, reply, self.rule.quorum is not None)
        versions: Sequence[int] = ()
        if pulled and not isinstance(reply, wire.Ack):
            if isinstance(reply, wire.Rows):
                nbytes = sum(map(len, reply.buffers))
            else:
                nbytes = sum(reply.lengths) or cast("Parcel", parcel).nbytes
            counts = counts.received(nbytes, reply.ahead if self.rule.mode == "async" else None)
            versions = reply.clocks
        return partial(self._note, counts, parcel, versions)

    def _note(self, counts: Counts, parcel: Carried, versions: Sequence[int]) -> None:
        if versions:
            self.clocks.advance(parcel, versions)
        self.counts = counts

    def _fail(self, operation: Operation) -> None:
        self._failed[operation] = None
