"""What goes between one worker and its store's servers: contributions out, values in, and who waits for which."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence

import torch

from kvstore.dist.compression import Compressing
from kvstore.consistency import Rule
from kvstore.errors import UsageError
from kvstore.dist.join import Joining
from kvstore.dist.optimizer import Optimizing
from kvstore.dist.outgoing import Load, Plain
from kvstore.dist.plans import Plan
from kvstore.dist.requests import Back, Remote
from kvstore.member.session import Session
from kvstore.dist.parcels import Parcel
from kvstore.spec import require_floats
from kvstore.ticket import Ticket
from kvstore.values import Leaving
from kvstore.wire import MAX_PRIORITY, Ack, Values
from kvstore.dist.incoming import Writer


class Exchange:
    """Sends and asks for what plans say; keeps the tickets of pushes until they have taken effect.

    Args:
        session: this process's membership in the job.
        remote: the servers.
        rule: how updates and reads go together.
        timeout_s: the deadline of every wait.
        optimizing: what updates are to be made with.
        joining: whether this worker may push.

    Attributes:
        lock: of all here, and of the clocks of entries: they must be sent in the order in which they are taken.
        compressing: how values are encoded; None for as they are.
        pushes, pulls, bytes_pulled, late, staleness: see ``Statistics``.
    """

    def __init__(
        self, session: Session, remote: Remote, rule: Rule, timeout_s: float, optimizing: Optimizing, joining: Joining
    ) -> None:
        self.lock = threading.RLock()
        self.compressing: Compressing | None = None
        self.pushes = self.pulls = self.bytes_pulled = self.late = 0
        self.staleness: Counter[int] = Counter()
        self._session = session
        self._remote = remote
        self._rule = rule
        self._timeout_s = timeout_s
        self._optimizing = optimizing
        self._joining = joining
        self._pushed: deque[Ticket] = deque()
        self._failed: deque[Ticket] = deque()

    @property
    def outstanding(self) -> int:
        """How many pushes have not taken effect yet."""
        with self.lock:
            return sum(1 for ticket in self._pushed if ticket.open)

    def pushpull(self, plan: Plan, values: Sequence[torch.Tensor], writer: Writer, priority: int, wait: bool) -> Ticket:
        """Send ``values``, contiguous tensors, and take the new values into what may be the same memory."""
        if writer.disturbs(values):
            values = [value.clone() for value in values]
        if not wait:
            return self.push("pushpull", plan, values, writer, priority)
        with self._session.client.lending():
            ticket = self.push("pushpull", plan, values, writer, priority, in_turn=True)
            ticket.wait()
        return ticket

    def push(
        self,
        what: str,
        plan: Plan,
        values: Sequence[torch.Tensor],
        writer: Writer | None,
        priority: int = 0,
        *,
        in_turn: bool = False,
    ) -> Ticket:
        """Send ``values``, contiguous tensors, as this worker's next contribution.

        Args:
            what: the call, for messages.
            writer: takes the new values; None if they are not wanted.
            priority: of its messages among those that wait to be sent; but no push overtakes another of the same key.
            in_turn: they may wait for their turn, for a caller that waits for them, leaves the values as they are
                until then, and is in ``Client.lending``.
        """
        if self._rule.mode == "async":
            self._optimizing.require("push")
        if not plan.floats and self._optimizing.optimizer is not None:
            require_floats((key, entry.spec) for key, entry in zip(plan.keys, plan.entries, strict=True))
        ticket = self._ticket(what, plan)
        with self.lock:
            if self._joining.under_way:
                raise UsageError("this worker has joined, and others have not yet: call join() again, which waits on")
            load: Load
            if self.compressing is None:
                load = Plain(self._remote.packer, Leaving(values))
            else:
                load = self.compressing.load(plan, values, self._remote.packer)
            self.pushes += len(plan.keys)
            if writer is not None:
                self.pulls += len(plan.keys)
            priority = max(-MAX_PRIORITY, min(int(priority), MAX_PRIORITY))
            self._forget()
            # The pushes of a key stay in order, and so do their answers, which may go into the same array.
            order = None if self._pushed and any(entry.on_way for entry in plan.entries) else priority
            turn = priority if in_turn else None
            for entry in plan.entries:
                entry.clock += 1
                entry.pushed = ticket
            note = None if self._rule.quorum is None else self._note
            hyper = self._optimizing.hyper()
            for parcel in plan.parcels:
                back = None if writer is None else self._back(parcel, writer)
                self._remote.push(ticket, parcel, load, hyper, back, note, order, turn)
            self._pushed.append(ticket)
        return ticket

    def pull(self, plan: Plan, writer: Writer, priority: int) -> Ticket:
        """Ask for values that include this worker's contributions so far."""
        ticket = self._ticket("pull", plan)
        with self.lock:
            self.pulls += len(plan.keys)
            for parcel in plan.parcels:
                self._remote.pull(ticket, parcel, priority, self._back(parcel, writer))
        return ticket

    def flush(self, timeout_s: float) -> None:
        """Wait until every push has taken effect; raise what has gone wrong."""
        with self.lock:
            waited = list(self._pushed)
        self._session.client.wait_all(waited, timeout_s)
        with self.lock:  # meanwhile another thread may have pushed
            self._forget()
        self.check()

    def check(self) -> None:
        """Raise what has gone wrong since the last call."""
        self._session.check(self._remote.number)
        with self.lock:
            while self._failed:
                ticket = self._failed.popleft()
                if not ticket.raised:
                    ticket.wait()

    def _forget(self) -> None:
        """Let go of the oldest pushes, those that have taken effect."""
        while self._pushed and not self._pushed[0].open:
            self._pushed.popleft()

    def _back(self, parcel: Parcel, writer: Writer) -> Back:
        """How the values of ``parcel`` come back, and into what."""
        how = self.compressing
        write = writer.taker(parcel, None if how is None else how.decoder(parcel))

        def take(reply: Values) -> None:
            self.bytes_pulled += sum(reply.lengths) or parcel.nbytes
            write(reply)
            self._note(reply)
            if reply.clocks:
                parcel.advance(reply.clocks)
            if self._rule.mode == "async":
                self.staleness[reply.ahead] += 1

        if how is None:
            return Back(take, None, parcel.nbytes)
        return Back(take, how.asked(parcel), parcel.nbytes // how.fold)

    def _note(self, reply: Ack | Values) -> None:
        self.late += reply.missed

    def _ticket(self, what: str, plan: Plan) -> Ticket:
        return Ticket(what, plan.keys, self._session.client, self._failed.append, self._timeout_s)
