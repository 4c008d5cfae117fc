"""Contributions out, values in: what one worker pushes and pulls, and what its clocks are meanwhile.

A push is one transaction. All that can be wrong with it is found before anything has changed; then its clocks and its
requests are taken in as one, and from there on it is made, whatever happens to the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from kvstore.dist.clocks import PushClocks
from kvstore.dist.compression import Compressing
from kvstore.dist.incoming import Decode, Writer
from kvstore.dist.join import Joining
from kvstore.dist.optimizer import Optimizing, PushHyperparameters
from kvstore.dist.outgoing import Load, Plain
from kvstore.dist.plans.parcels import Parcel
from kvstore.dist.plans.plan import Plan
from kvstore.dist.requests import Requests
from kvstore.errors import UsageError
from kvstore.member.outstanding import Effect, PendingRequest, Turn
from kvstore.member.session import Session
from kvstore.rule import Rule
from kvstore.spec import require_floats
from kvstore.ticket import Operation
from kvstore.values import Arrays, Leaving
from kvstore.wire import MAX_PRIORITY, Ack, CodecDescription, Pull, Push, Sender, Values


class Counts(NamedTuple):
    """What has been counted so far; see ``Statistics``."""

    pushes: int = 0
    pulls: int = 0
    bytes_pushed: int = 0
    bytes_pulled: int = 0
    late: int = 0
    staleness: tuple[tuple[int, int], ...] = ()


class Pushes:
    """The pushes and pulls of one store.

    Args:
        session: this process's membership in the job.
        requests: the store's.
        rule: how updates and reads go together.
        clocks: of this worker's keys.
        optimizing: what updates are to be made with.
        joining: whether this worker may push.

    Attributes:
        compressing: how values are encoded; None for as they are.
        counts: what has been counted.
    """

    def __init__(
        self,
        session: Session,
        requests: Requests,
        rule: Rule,
        clocks: PushClocks,
        optimizing: Optimizing,
        joining: Joining,
    ) -> None:
        self.compressing: Compressing | None = None
        self.counts = Counts()
        self.session = session
        self.store = requests.store
        self.rule = rule
        self.clocks = clocks
        self._requests = requests
        self._client = session.client
        self._optimizing = optimizing
        self._joining = joining
        self._number = 0  # of the last push
        self._pushed: dict[int, Operation] = {}  # by number, those that may not have taken effect yet
        self._failed: dict[Operation, None] = {}

    @property
    def outstanding(self) -> int:
        """How many pushes have not taken effect yet."""
        return sum(1 for operation in list(self._pushed.values()) if operation.open)

    @property
    def bytes_pushed(self) -> int:
        """Bytes of gradients that have been sent."""
        return self.counts.bytes_pushed + sum(
            request.sent for request in self._client.of(_Push) if request.pushes is self
        )

    def pushpull(
        self, plan: Plan, values: Arrays | Sequence[torch.Tensor], writer: Writer, priority: int, wait: bool
    ) -> Operation:
        """Send ``values``, contiguous, and take the new values into what may be the same memory."""
        if not (isinstance(values, Arrays) and values.own) and writer.disturbs(tensors := _tensors(values)):
            values = [tensor.clone() for tensor in tensors]
        return self.push("pushpull", plan, values, writer, priority, wait)

    def push(
        self,
        what: str,
        plan: Plan,
        values: Arrays | Sequence[torch.Tensor],
        writer: Writer | None = None,
        priority: int = 0,
        wait: bool = False,
    ) -> Operation:
        """Send ``values``, contiguous, as this worker's next contribution.

        Args:
            what: the call, for messages.
            writer: takes the new values; None if they are not wanted.
            priority: of its messages among those that wait to be sent; but no push overtakes another of the same key.
            wait: return when it has taken effect. Until then messages may wait for their turn, and read the values when
                they leave.
        """
        if self.rule.mode == "async":
            self._optimizing.require("push")
        if not plan.floats and self._optimizing.optimizer is not None:
            require_floats(zip(plan.keys, plan.specs, strict=True))
        operation = self._operation(what, plan)
        load: Load
        if self.compressing is None:
            load = Plain(self._requests.packer, Leaving(values))
        else:
            load = self.compressing.load(plan, _tensors(values), self._requests.packer)
        make = self._client.exchange if wait else self._client.submit
        make(operation, self._push, plan, load, writer, priority, wait)
        return operation

    def pull(self, plan: Plan, writer: Writer, priority: int, wait: bool) -> Operation:
        """Ask for values that include this worker's contributions so far."""
        operation = self._operation("pull", plan)
        make = self._client.exchange if wait else self._client.submit
        make(operation, self._pull, plan, writer, priority)
        return operation

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every push has taken effect; raise what has gone wrong."""
        self._client.wait_all(list(self._pushed.values()), timeout)
        self.check()

    def check(self) -> None:
        """Raise what has gone wrong since the last call."""
        self.session.check(self.store)
        for operation in list(self._failed):
            if not operation.raised:
                operation.wait()
            self._failed.pop(operation, None)

    # ---- alone at the links

    def _push(
        self, operation: Operation, plan: Plan, load: Load, writer: Writer | None, priority: int, wait: bool
    ) -> tuple[Sequence[PendingRequest], Effect]:
        if self._joining.under_way:
            raise UsageError("this worker has joined, and others have not yet: call join() again, which waits on")
        self._forget()
        priority = max(-MAX_PRIORITY, min(int(priority), MAX_PRIORITY))
        # The pushes of a key stay in order, and so do their answers, which may go into the same array.
        order = None if self._on_way(plan) else priority
        clocks = self.clocks.pushed[plan.places] + 1
        hyper = self._optimizing.hyper()
        requests = []
        for parcel in plan.parcels:
            back = None if writer is None else self._back(parcel, writer)
            turn = Turn(back.nbytes, priority) if wait and back is not None else None
            requests.append(_Push(self, operation, parcel, self.clocks.after(parcel), load, hyper, back, order, turn))
        counts = self.counts._replace(
            pushes=self.counts.pushes + len(plan.keys),
            pulls=self.counts.pulls + (0 if writer is None else len(plan.keys)),
        )
        return requests, partial(self._made, self._number + 1, operation, plan, clocks, counts)

    def _made(self, number: int, operation: Operation, plan: Plan, clocks: Any, counts: Counts) -> None:
        self.clocks.note(plan.places, clocks, number)
        self._pushed[number] = operation
        self._number = number
        self.counts = counts

    def _pull(
        self, operation: Operation, plan: Plan, writer: Writer, priority: int
    ) -> tuple[Sequence[PendingRequest], Effect]:
        requests = []
        for parcel in plan.parcels:
            back = self._back(parcel, writer)
            requests.append(
                _Pull(self, operation, parcel, self.clocks.of(parcel), back, Turn(back.nbytes, int(priority)))
            )
        counts = self.counts._replace(pulls=self.counts.pulls + len(plan.keys))
        return requests, partial(self._count, counts)

    def _count(self, counts: Counts) -> None:
        self.counts = counts

    def _on_way(self, plan: Plan) -> bool:
        """Whether the last push of one of the plan's keys has not taken effect yet."""
        if not self._pushed:
            return False
        numbers = set(self.clocks.last[plan.places].tolist())
        return any(number in self._pushed and self._pushed[number].open for number in numbers)

    def _forget(self) -> None:
        """Let go of the oldest pushes, those that have taken effect."""
        for number, operation in list(self._pushed.items()):
            if operation.open:
                return
            self._pushed.pop(number, None)

    def _back(self, parcel: Parcel, writer: Writer) -> _Back:
        how = self.compressing
        if how is None:
            return _Back(writer, None, None, parcel.nbytes)
        return _Back(writer, how.decoder(parcel), how.asked(parcel), parcel.nbytes // how.fold)

    def noted(self, parcel: Parcel, reply: Ack | Values, pushed: int, pulled: bool) -> Effect:
        """Return what an answer changes: of ``pushed`` bytes, and of values that were ``pulled`` if they were."""
        counts = self.counts
        staleness = counts.staleness
        if pulled and self.rule.mode == "async" and isinstance(reply, Values):
            seen = dict(staleness)
            seen[reply.ahead] = seen.get(reply.ahead, 0) + 1
            staleness = tuple(seen.items())
        counts = Counts(
            counts.pushes,
            counts.pulls,
            counts.bytes_pushed + pushed,
            counts.bytes_pulled + (sum(reply.lengths) or parcel.nbytes if pulled and isinstance(reply, Values) else 0),
            counts.late + (reply.missed if self.rule.quorum is not None else 0),
            staleness,
        )
        versions = reply.clocks if pulled and isinstance(reply, Values) else []
        return partial(self._noted, counts, parcel, versions)

    def _noted(self, counts: Counts, parcel: Parcel, versions: Sequence[int]) -> None:
        if versions:
            self.clocks.advance(parcel, versions)
        self.counts = counts

    def _operation(self, what: str, plan: Plan) -> Operation:
        return Operation(what, plan.keys, self._client, self._fail, self._requests.limits)

    def _fail(self, operation: Operation) -> None:
        self._failed[operation] = None


def _tensors(values: Arrays | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return values.tensors if isinstance(values, Arrays) else values


class _Back(NamedTuple):
    """How values come back: into what, encoded how, and how many bytes of the window they take."""

    writer: Writer
    decode: Decode | None
    codec: CodecDescription
    nbytes: int


class _Values(PendingRequest):
    """Asks for values of a parcel's segments; ``back`` is None where they are not wanted, or no longer."""

    __slots__ = ("back", "clocks", "parcel", "pushes")

    def __init__(
        self,
        pushes: Pushes,
        operation: Operation,
        parcel: Parcel,
        clocks: list[int],
        back: _Back | None,
        priority: int | None,
        turn: Turn | None,
    ) -> None:
        super().__init__(pushes.session.servers[parcel.server], operation, priority, turn)
        self.pushes = pushes
        self.parcel = parcel
        self.clocks = clocks
        self.back = back

    def take(self, reply: Any) -> Effect:
        """See ``PendingRequest``."""
        back = self.back
        if back is not None:
            back.writer.take(self.parcel, reply, back.decode)
        return self.pushes.noted(self.parcel, reply, self._sent, back is not None)

    def forsake(self) -> None:
        """See ``PendingRequest``."""
        self.back = None

    @property
    def _sent(self) -> int:
        return 0


class _Pull(_Values):
    """The values that include this worker's contributions so far."""

    __slots__ = ("codec",)

    def __init__(
        self, pushes: Pushes, operation: Operation, parcel: Parcel, clocks: list[int], back: _Back, turn: Turn
    ) -> None:
        super().__init__(pushes, operation, parcel, clocks, back, None, turn)
        self.codec = back.codec

    def message(self, sender: Sender) -> Pull:
        """See ``PendingRequest``."""
        return Pull(sender, self.pushes.store, self.parcel.ids, self.clocks, self.codec)

    def forsake(self) -> None:
        """See ``PendingRequest``; whether it fails does not matter any more either."""
        super().forsake()
        self.operation.raised = True


class _Push(_Values):
    """This worker's contribution to a parcel's segments. Its values are packed, or encoded, when it goes."""

    __slots__ = ("codec", "hyper", "load", "order", "sent", "want")
    early = False

    def __init__(
        self,
        pushes: Pushes,
        operation: Operation,
        parcel: Parcel,
        clocks: list[int],
        load: Load,
        hyper: PushHyperparameters,
        back: _Back | None,
        order: int | None,
        turn: Turn | None,
    ) -> None:
        super().__init__(pushes, operation, parcel, clocks, back, order if turn is None else None, turn)
        self.load = load
        self.hyper = hyper
        self.order = order
        self.want = back is not None
        self.codec = None if back is None else back.codec
        self.sent = 0  # bytes of gradients

    def message(self, sender: Sender) -> Push:
        """See ``PendingRequest``."""
        gather = self.turn is not None and self.pushes.session.client.gathers(self.peer)
        buffers, codec, lengths, spans = self.load.pack(self.parcel, gather)
        self.sent = self.parcel.nbytes if codec is None else sum(lengths)
        return Push(
            sender,
            store=self.pushes.store,
            ids=self.parcel.ids,
            clocks=self.clocks,
            want=self.want,
            lr=self.hyper.lr,
            rescale=self.hyper.rescale,
            codec=codec,
            lengths=list(lengths),
            segment_counts=list(spans),
            back=self.codec,
            changes=self.hyper.changes,
            priority=self.order,
            buffers=buffers,
        )

    @property
    def _sent(self) -> int:
        return self.sent
