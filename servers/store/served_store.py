"""One store on one server: what requests do to its segments. No I/O, no clock.

In mode ``sync``, a push is a contribution to a round. When a round is complete, its sum is assigned, or the optimizer
steps with it, and the requests that wait for the round are answered. In mode ``async``, every push is an update at
once, and a worker that is too far ahead of others waits at its next read. All buckets that one message completes are
updated by one call of the optimizer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from kvstore import wire
from kvstore.lineage import UNKNOWN
from kvstore.optim.optimizer import Optimizer
from kvstore.rule import Rule
from kvstore.spec import Spec
from kvstore.transport.memory import Heap, Memory
from kvstore.values import ranges_of
from servers.activity import Waits
from servers.requests.reasons import Reason
from servers.requests.replies import Answer, refuse
from servers.store.buckets import Buckets
from servers.store.capture import Captures
from servers.store.contributions import contribute, require_mergeable, updates_of
from servers.store.grouped_pushes import GroupedPushes
from servers.store.lateness import ArrivalTimes
from servers.store.recording import Recording
from servers.store.rounds import Rounds, WorkerClocks
from servers.store.served_tables import ServedTables
from servers.store.shortcuts import Shortcuts
from servers.store.states import get_states, put_states
from servers.store.store_progress import StoreProgress
from servers.store.target import Bucket, WaitingRequest
from servers.store.updates import Update, Updates, is_late
from servers.store.value_replies import ValueReplies
from servers.store.waiting import Pauses, Waiting


class ServedStore:
    """One store.

    Args:
        rule: of the store.
        workers: the ranks of the job's workers.
        memory: for values and sums.
        recording: tells a standby, if there is one.
        times: when pushes come; None keeps no account.
        lineage: in which its arrays are, and its tables begin; see ``kvstore.lineage``.

    Attributes:
        rule, lineage: see above.
        buckets: its segments.
        captures: those for checkpoints that are under way.
        updates: what contributions do to them.
        tables: those of its segments that are of tables, and what requests do to these.
        values: makes the answers that bring values.
        recording: tells a standby, if there is one.
        progress: closes rounds, and answers requests.
    """

    def __init__(
        self,
        rule: Rule,
        workers: Collection[int],
        memory: Memory | None = None,
        recording: Recording | None = None,
        times: ArrivalTimes | None = None,
        lineage: int = UNKNOWN,
    ) -> None:
        rule.require_workers(len(workers))
        memory = memory or Heap()
        self.rule = rule
        self.lineage = lineage
        self.recording = recording or Recording()
        self.buckets = Buckets(self._new_rounds, memory, self.recording)
        self.updates = Updates(rule, self.buckets, memory, self.recording)
        self.tables = ServedTables(rule, self.buckets, self.updates, memory, self.recording, self._new_rounds, lineage)
        self.captures = Captures(self.buckets, self.updates)
        self.values = ValueReplies(rule, self.buckets, self.updates, self.recording)
        self._workers = frozenset(workers)
        times = times or ArrivalTimes(max(workers, default=0) + 1)
        self._waiting = Waiting(rule, self._workers, self.buckets, times)
        self.progress = StoreProgress(
            rule, self.buckets, self.updates, self.tables, self.captures, self.values, self._waiting, times
        )
        self._grouped = GroupedPushes(
            rule, self.buckets, self.tables, self.captures, self._waiting, self.progress, self.recording
        )
        self._shortcuts = Shortcuts(rule, self.buckets, self._waiting, self.progress)

    @property
    def pauses(self) -> Pauses:
        """The workers that have nothing more to contribute for now."""
        return self._waiting.pauses

    @property
    def parked(self) -> list[WaitingRequest]:
        """The requests that wait for rounds."""
        return self._waiting.parked

    def init(self, message: wire.Init) -> None:
        """Take new segments and their first values."""
        kinds = [Spec(tuple(shape), message.dtype) for shape in message.shapes]
        specs = list(map(kinds.__getitem__, message.kinds))
        ranges = ranges_of(message.buffers, message.dtype, sum(spec.size for spec in specs))
        self.buckets.add(message.ids, message.keys, specs, ranges)

    def push(self, peer: bytes, message: wire.Push) -> list[Answer]:
        """Take contributions, of one worker or several, and answer the requests that need not wait any more."""
        answers = self._shortcuts.take(peer, message)
        if answers is not None:
            return answers
        rule, several = self.rule, len(message.ranks) > 1
        if several or message.rank_clocks:
            require_mergeable(message, rule)
        pauses = self._waiting.pauses
        if pauses.ranks:
            pauses.require_before(message)
        buckets = self.buckets.pushed(message.ids, message.clocks)
        updates = self._updates_of(message, buckets)
        late = 0
        if rule.quorum is not None:
            late = sum(len(b.ids) for b, (part,), *_ in updates if is_late(b, part.ranks, part.clock, rule))
        if self.recording.on and (rule.mode == "async" or (late and rule.late == "keep")):
            self.recording.note(message)
        for bucket, (part,), *_ in updates:
            if not bucket.rounds.counts(part.ranks, part.clock):
                contribute(message, bucket, part)
        error = self._update(message, updates) if rule.mode == "async" else self.buckets.doubt_of(message.ids)
        self._shortcuts.learn(message, buckets)
        return self.progress.pushed(peer, message, buckets, late, error)

    def _update(self, message: wire.Push, updates: Sequence[Update]) -> Exception | None:
        """Make the updates of a push that is one by itself; return the first error."""
        buckets = [update.bucket for update in updates]
        if self.captures:
            self.captures.secure(buckets)
        tracer = self.progress.tracer
        began = 0.0 if tracer is None else tracer.clock()
        errors = self.updates.make(updates)
        if tracer is not None:
            self.progress.note(tracer, "update", began, message.clocks, buckets)
        return next(iter(errors.values()), None)

    def push_rows(self, peer: bytes, message: wire.PushRows) -> list[Answer]:
        """Take a worker's contributions to tables, and answer the requests that need not wait any more."""
        grouped = self._grouped.take(peer, message)
        if grouped is not None:
            self.tables.updates.answers.forget()
            return grouped
        self.pauses.require_before(message)
        updates = self.tables.contributions(message)
        late = 0
        if self.rule.quorum is not None:
            late = sum(is_late(target, part.ranks, part.clock, self.rule) for target, (part,), *_ in updates)
        if self.recording.on and (self.rule.mode == "async" or (late and self.rule.late == "keep")):
            self.recording.note(message)
        for target, (part,), *_ in updates:
            if not target.rounds.counts(part.ranks, part.clock):
                target.rounds.contribute(part.ranks, part.clock, part)
        errors = self.tables.updates.make(updates) if self.rule.mode == "async" else {}
        targets = [update.target for update in updates]
        error = next(iter(errors.values()), None) or self.buckets.doubt_of(message.ids)
        answers = self.progress.pushed(peer, message, targets, late, error)
        self.tables.updates.answers.forget()
        self._grouped.learn(targets)
        return answers

    def follow_push_rows(self, message: wire.PushRows) -> Exception | None:
        """Take contributions to tables that another server has recorded; see ``follow_push``."""
        updates = self.tables.contributions(message)
        for target, (part,), *_ in updates:
            if self.rule.mode == "async" or part.clock <= target.rounds.version:
                target.rounds.contribute(part.ranks, part.clock, part)
        errors = self.tables.updates.make(updates) if self.rule.mode == "async" else {}
        self.tables.updates.answers.forget()  # another server answers
        return next(iter(errors.values()), None)

    def follow_push(self, message: wire.Push) -> Exception | None:
        """Take contributions that another server has recorded: an update, or those of them that are late.

        Returns:
            The error of an update.
        """
        updates = self._updates_of(message, self.buckets.of(message.ids))
        if self.rule.mode == "sync":
            for bucket, (part,), *_ in updates:
                if part.clock <= bucket.rounds.version:
                    contribute(message, bucket, part)
            return None
        for bucket, (part,), *_ in updates:
            contribute(message, bucket, part)
        return next(iter(self.updates.make(updates).values()), None)

    def follow_rounds(self, message: wire.ClosedRounds) -> list[Answer]:
        """Close rounds as another server has; answer those inside ``join``, if it is over.

        Raises:
            ValueError: they are not the next rounds of this store.
        """
        tracer = self.progress.tracer
        began = 0.0 if tracer is None else tracer.clock()
        self.updates.follow(message)
        if tracer is not None:
            self.progress.note(tracer, "follow", began, message.versions)
        return self.progress.resume()

    def follow_updated(self, message: wire.Updated) -> list[Answer]:
        """Take what updates have made on another server; see ``follow_rounds`` and ``Updates.follow_updated``."""
        self.updates.follow_updated(message)
        return self.progress.resume()

    def follow_row_rounds(self, message: wire.ClosedRowRounds) -> list[Answer]:
        """Close rounds of tables as another server has; see ``follow_rounds``."""
        tracer = self.progress.tracer
        began = 0.0 if tracer is None else tracer.clock()
        self.tables.updates.follow(message, self.buckets.tables_of(message.ids))
        if tracer is not None:
            self.progress.note(tracer, "follow", began, message.versions)
        return self.progress.resume()

    def pull(self, peer: bytes, message: wire.Pull) -> list[Answer]:
        """Answer with values now, or when the rounds that they must include are over."""
        return self.progress.answer(self._waiting.park(peer, message))

    def pull_rows(self, peer: bytes, message: wire.PullRows) -> list[Answer]:
        """Answer with rows now, or when the rounds that they must include are over."""
        self.tables.require_wanted(message)
        return self.progress.answer(self._waiting.park(peer, message))

    def when_due(self, peer: bytes, message: wire.FreezeTable | wire.EvictRows) -> list[Answer]:
        """Do to a table what ``message`` asks now, or when the round is over that it names."""
        self.buckets.table(message.id)
        return self.progress.answer(self._waiting.park(peer, message))

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Update with ``optimizer`` from now on; its state stays if the update rule is the same.

        Raises:
            UsageError: it cannot update an array or a table that is here; nothing has changed.
        """
        use = self.tables.updaters(optimizer)
        self.updates.set_optimizer(optimizer)
        use()

    def get_states(self, message: wire.GetStates) -> wire.OptimizerStates:
        """Return the optimizer's states of the message's segments."""
        return get_states(message, self.buckets, self.updates)

    def put_states(self, message: wire.PutStates) -> None:
        """Take the optimizer's states that the message brings."""
        put_states(message, self.buckets, self.updates)

    def close(self, error: Exception) -> list[Answer]:
        """Fail all requests that wait: the store is closed."""
        self.tables.freezes.close()
        parked, inside_join = self._waiting.close()
        waiters = [(waiter.peer, waiter.request) for waiter in parked] + inside_join
        return [refuse(peer, request, error) for peer, request in waiters]

    def depart(self, workers: Collection[int]) -> list[Answer]:
        """Note which workers have left in order; fail or answer the requests that wait for them, as the rule says."""
        self._waiting.depart(workers)
        self.tables.freezes.depart(workers)
        targets = self.buckets.targets()
        for target in targets:
            target.rounds.leave(self._waiting.departed)
        return self.progress.without_pushes(targets)

    def pause(self, peer: bytes, message: wire.Pause) -> list[Answer]:
        """Take a worker out of the rounds after its last push. It is answered when all workers are inside ``join``."""
        for number in message.ids:
            self.buckets.target(number)
        clocks = self.pauses.add(peer, message)
        if self.recording.on:
            self.recording.note(message)
        self.buckets.apart(clocks)
        targets = self.buckets.targets()
        for target in targets:
            if target.ids[0] in clocks:
                target.rounds.pause(message.node.rank, clocks[target.ids[0]])
        return self.progress.without_pushes(targets)

    def explain(self, node: wire.Node, about: int) -> Reason:
        """Say what request ``about`` of ``node`` waits for; nothing if it does not wait."""
        return self._waiting.explain(node, about)

    def waits(self, now: float) -> Waits:
        """Return who waits for whom."""
        return self._waiting.waits(now)

    def _updates_of(self, message: wire.Push, buckets: Sequence[Bucket]) -> list[Update]:
        self.updates.require(buckets)
        return updates_of(message, buckets, self.rule, self.updates.optimizer)

    def _new_rounds(self) -> Rounds[Any] | WorkerClocks[Any]:
        made: Rounds[Any] | WorkerClocks[Any]
        if self.rule.mode == "async":
            made = WorkerClocks(self._workers)
        else:
            made = Rounds(self._workers, 0, self.rule.quorum, self.rule.late == "keep")
        made.leave(self._waiting.departed)
        return made
