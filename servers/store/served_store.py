"""One store on one server: requests change its segments, its rounds close, and requests are answered then. Pure.

In mode ``sync``, a push is a contribution to a round. When a round is complete, its sum is assigned, or the optimizer
steps with it, and the requests that wait for the round are answered. In mode ``async``, every push is an update at
once, and a worker that is too far ahead of others waits at its next read. All buckets that one message completes are
updated by one call of the optimizer.

Most pushes take a short way: ``push_as_before`` for arrays, ``push_to_group`` for tables. Each checks in a few steps
that nothing about its push is unusual. Otherwise it returns None and has changed nothing, and the general way takes the
push, or says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from kvstore import wire
from kvstore.errors import UsageError, WeightsInDoubt
from kvstore.lineage import UNKNOWN
from kvstore.optim.optimizer import Optimizer
from kvstore.rule import Rule
from kvstore.spec import FLOATS, Spec
from kvstore.tracer import Tracer
from kvstore.transport.memory import Heap, Memory
from kvstore.values import ranges_of
from kvstore.wire.coding import SharedFields
from servers.requests.replies import Answer, refuse
from servers.store.array_updates import Update, Updates, contribute, payload_of, require_mergeable, updates_of
from servers.store.bucket import Bucket, Contribution
from servers.store.buckets import Buckets
from servers.store.capture import Captures
from servers.store.first_sums import MOST_ROUNDS, FirstSums
from servers.store.grace import Grace
from servers.store.hyperparameters import UpdateHyperparameters, compressions, strays
from servers.store.lateness import ArrivalTimes
from servers.store.publishing import Publishing
from servers.store.recording import Recording
from servers.store.rounds import Rounds, WorkerClocks
from servers.store.row_target import GroupContribution, RowTarget, TableGroup
from servers.store.tables.row_requests import usual_push
from servers.store.tables.row_updates import RowUpdate
from servers.store.tables.served_tables import ServedTables
from servers.store.target import AnyTarget, ParkedRequest, PushRequest, WaitingRequest
from servers.store.value_replies import ValueReplies
from servers.store.waiting import Pauses, Waiting

MOST_KNOWN = 1024  # pushes that are known, far more lists than a job has; then all are forgotten
OF_ARRAYS = (wire.Push, wire.Pull)
OF_ROWS = (wire.PushRows, wire.PullRows)

CheckedUpdates: TypeAlias = Sequence[Update] | Sequence[RowUpdate]


class ServedStore:
    """One store.

    Args:
        recording: tells a standby, if there is one.
        times: when pushes come; None keeps no account.
        lineage: in which its arrays are, and its tables begin; see ``kvstore.lineage``.
        number: for how many of the workers a sum stands; None for all. See ``Rounds``.
    """

    def __init__(
        self,
        rule: Rule,
        workers: Collection[int],
        memory: Memory | None = None,
        recording: Recording | None = None,
        times: ArrivalTimes | None = None,
        lineage: int = UNKNOWN,
        number: int | None = None,
    ) -> None:
        rule.require_workers(len(workers))
        memory = memory or Heap()
        self.rule = rule
        self.lineage = lineage
        self.tracer: Tracer | None = None
        self.recording = recording or Recording()
        self.buckets = Buckets(self._new_rounds, memory, self.recording)
        self.updates = Updates(rule, self.buckets, memory, self.recording)
        self.tables = ServedTables(rule, self.buckets, self.updates, memory, self.recording, self._new_rounds, lineage)
        self.captures = Captures(self.buckets, self.updates)
        self.publishing = Publishing(self.recording.store, self.buckets, self.recording)
        self.values = ValueReplies(rule, self.buckets, self.updates, self.recording)
        self._workers = frozenset(workers)
        self._number = number
        self._times = times or ArrivalTimes(max(workers, default=0) + 1)
        self.waiting = Waiting(rule, self._workers, self.buckets, self._times)
        self.grace = Grace(rule.grace) if rule.grace else None
        self._sync = rule.mode == "sync"
        # Where a quorum closes a round, a push may be late: the short ways would have to look for that.
        self._knows = self._sync and rule.quorum is None
        self._groups = rule.quorum is None and not rule.finite
        # Of a push that has been checked once: its only bucket, and the hyper-parameters to update it with.
        self._known: dict[SharedFields | None, tuple[list[Bucket], UpdateHyperparameters]] = {}
        self._grouping = self.buckets.grouping
        # Since an aggregator was lost, by segment and rank of its host: the last push that counted, and those before
        # it that had not, where each push is an update. Workers repeat what has not been answered.
        self._counted: dict[int, Mapping[int, tuple[int, Collection[int]]]] = {}
        # Where workers may come back: what they repeat of sums from before training.
        self.first_sums: FirstSums | None = None
        self._newcomers: list[int] = []  # the workers that were started again, in the order in which they came back
        self.admissions: list[wire.Admit] = []  # of workers that may not be in all rounds yet, for a new standby

    @property
    def pauses(self) -> Pauses:
        """The workers that have nothing more to contribute for now."""
        return self.waiting.pauses

    @property
    def parked(self) -> list[WaitingRequest]:
        return self.waiting.parked

    def init(self, message: wire.Init) -> None:
        kinds = [Spec(tuple(shape), message.dtype) for shape in message.shapes]
        specs = list(map(kinds.__getitem__, message.kinds))
        ranges = ranges_of(message.buffers, message.dtype, sum(spec.size for spec in specs))
        self.buckets.add(message.ids, message.keys, specs, ranges)

    # ---- pushes

    def push(self, peer: bytes, message: wire.Push) -> list[Answer]:
        """Take contributions, of one worker or several, and answer the requests that need not wait any more."""
        if self.waiting.lost and self._is_out(message):
            return self._repeat(peer, message)
        answers = self.push_as_before(peer, message)
        if answers is not None:
            return answers
        if self._counted and self._has_counted(message):
            return self._answer(self.waiting.park(peer, message))
        # All checks before the first change: a push that is refused has contributed to no bucket, so that it can be
        # corrected and sent again, and so that no round is closed by half of a message.
        if len(message.ranks) > 1 or message.rank_clocks:
            require_mergeable(message, self.rule)
        self.pauses.require_before(message)
        buckets = self.buckets.pushed(message.ids, message.clocks)
        updates = self._updates_of(message, buckets)
        self._learn(message, buckets)
        return self._push(peer, message, buckets, updates)

    def _repeat(self, peer: bytes, message: wire.Push) -> list[Answer]:
        """Answer a push of a worker that was started again, and is not in yet: others have made it without this one.

        So a sum that its program makes before training is the one that all others have had.
        """
        if not self._sync or self.updates.optimizer is not None:
            raise UsageError(f"{message.node} pushes before another worker has let it in")
        if self.first_sums is not None and message.want and message.back is None:
            sums = self.first_sums.find(message.ids, message.clocks)
            if sums is not None:
                return [
                    Answer(
                        peer,
                        message,
                        wire.Values(message.seq, buffers=wire.pack_arrays([memoryview(each) for each in sums])),
                    )
                ]
        for number, clock in zip(message.ids, message.clocks, strict=True):
            target = self.buckets.target(number)
            # Beyond the first rounds it is no sum from before training: this worker would follow the others' sums, and
            # nobody would count what it pushes.
            if target.rounds.version > clock or clock > MOST_ROUNDS:
                raise UsageError(
                    f"{message.node} was started again, and repeats sum {clock} of "
                    f"{target.segments.keys[target.places[number]]!r}, of which the others have made "
                    f"{target.rounds.version}: only small sums from before training are kept. Make it when "
                    "another worker has let this one in"
                )
        return self._answer(self.waiting.park(peer, message))

    def _is_out(self, message: PushRequest) -> bool:
        """Whether a push is of a worker that was started again or added, and that nobody has let in yet."""
        return message.node.role == "worker" and message.node.rank in self.waiting.lost

    def push_rows(self, peer: bytes, message: wire.PushRows) -> list[Answer]:
        if self.waiting.lost and self._is_out(message):
            raise UsageError(f"{message.node} pushes rows before another worker has let it in")
        answers = self.push_to_group(peer, message)
        if answers is None:
            self.pauses.require_before(message)
            updates = self.tables.contributions(message)
            targets = [update.target for update in updates]
            answers = self._push(peer, message, targets, updates)
            if self._may_group():
                self.buckets.groups.learn(targets)
        self.tables.updates.answers.forget()
        return answers

    def push_as_before(self, peer: bytes, message: wire.Push) -> list[Answer] | None:
        """Take a push that repeats an earlier one but for worker, round and values; return None if it does not.

        If it raises, the values do not fit the segments, and nothing has changed.
        """
        if self._grouping is not self.buckets.grouping:  # a split bucket would take pushes that nobody waits for
            self._forget_known()
        known = self._known.get(message.shared)
        if known is None or self.waiting.uneven or self.buckets.doubts:
            return None
        clocks, ranks = message.clocks, message.workers
        clock = clocks[0]
        if message.rank_clocks or clocks.count(clock) < len(clocks):
            return None
        buckets, hyper = known
        bucket = buckets[0]
        contribution = Contribution(ranks, clock, payload_of(message, buckets), hyper, message.weight)
        if not bucket.rounds.contribute(ranks, clock, contribution):
            return None
        self.waiting.wait(peer, message, bucket, clock)
        return self._contributed(message, buckets)

    def push_to_group(self, peer: bytes, message: wire.PushRows) -> list[Answer] | None:
        """Take a push to all tables of a group; return None if it is unusual, or there is no such group."""
        group = self.buckets.groups.find(message.ids)
        if group is None or message.changes or not self._may_group():
            return None
        clock, ranks = message.clocks[0], message.workers
        if message.clocks.count(clock) < len(message.clocks):
            return None
        pushed = usual_push(message, group)
        if pushed is None:
            return None
        hyper = UpdateHyperparameters(message.lr, message.rescale)
        request = message.sender[:2] if pushed.answer else None
        contribution = GroupContribution(ranks, clock, pushed.batch, hyper, request)
        counted = group.rounds.contribute(ranks, clock, contribution)
        if not self._sync:
            error = self.tables.updates.make_of_group(group, [contribution], hyper)
            return self._pushed(peer, message, [group], 0, error)
        if not counted:
            return None
        self.waiting.wait(peer, message, group, clock)
        return self._contributed(message, [group])

    def follow_push(self, message: PushRequest) -> Exception | None:
        """Take contributions that another server has recorded: an update, or the late ones among them.

        Return its error.
        """
        updates: CheckedUpdates
        if isinstance(message, wire.Push):
            updates = self._updates_of(message, self.buckets.of(message.ids))
        else:
            updates = self.tables.contributions(message)
        for target, (contribution,), *_ in updates:
            if not self._sync or contribution.clock <= target.rounds.version:
                contribute(message, target, contribution)
        if self._sync:
            return None
        errors = self._make(message, updates)
        self.tables.updates.answers.forget()  # another server answers
        return next(iter(errors.values()), None)

    def _push(
        self, peer: bytes, message: PushRequest, targets: Sequence[AnyTarget], updates: CheckedUpdates
    ) -> list[Answer]:
        """Take checked ``updates``: to ``targets``, one each."""
        rule, late = self.rule, 0
        if rule.quorum is not None:
            late = sum(len(target.ids) for target, (p,), *_ in updates if target.rounds.is_late(p.ranks, p.clock))
        # Recorded before it contributes: whatever the standby is sent later, as the record of a round, may include it.
        if self.recording.on and (not self._sync or (late and rule.late == "keep")):
            self.recording.note(message)
        for target, (contribution,), *_ in updates:
            if not target.rounds.counts(contribution.ranks, contribution.clock):
                if self.grace is not None:
                    self.grace.came(target, contribution.ranks, contribution.clock, self._times.now)
                contribute(message, target, contribution)
        error = None
        if not self._sync:
            if self.captures:
                self.captures.secure([target for target in targets if isinstance(target, Bucket)])
            began = 0.0 if self.tracer is None else self.tracer.clock()
            errors = self._make(message, updates)
            if self.tracer is not None:
                self._note(self.tracer, "update", began, message.clocks, targets)
            error = next(iter(errors.values()), None)
        return self._pushed(peer, message, targets, late, error or self.buckets.doubt_of(message.ids))

    def _make(self, message: PushRequest, updates: Sequence[Any]) -> dict[Any, Exception]:
        errors: dict[Any, Exception] = {}
        errors |= self.updates.make(updates) if isinstance(message, wire.Push) else self.tables.updates.make(updates)
        return errors

    def _updates_of(self, message: wire.Push, buckets: Sequence[Bucket]) -> list[Update]:
        self.updates.require(buckets)
        return updates_of(message, buckets, self.rule, self.updates.optimizer)

    def _learn(self, message: wire.Push, buckets: list[Bucket]) -> None:
        """Remember the checks of a push to ``buckets`` for ``push_as_before``."""
        if not self._knows or message.shared is None or message.changes:
            return
        if len(buckets) != 1 or buckets[0].dtype not in FLOATS:  # an optimizer does not take others
            return
        if len(self._known) >= MOST_KNOWN or self._grouping is not self.buckets.grouping:
            self._forget_known()
        hyper = UpdateHyperparameters(message.lr, message.rescale, (), *compressions(message))
        self._known[message.shared] = buckets, hyper

    def _forget_known(self) -> None:
        self._known.clear()
        self._grouping = self.buckets.grouping

    def _may_group(self) -> bool:
        """Return whether there may be groups now: nobody needs tables one by one, and no request may wait in vain."""
        return self._groups and not (self.waiting.uneven or self.recording.on or self.captures or self.buckets.doubts)

    # ---- other requests

    def when_due(
        self, peer: bytes, message: wire.Pull | wire.PullRows | wire.FreezeTable | wire.EvictRows
    ) -> list[Answer]:
        """Do what ``message`` asks now, or when the rounds that it names are over."""
        if isinstance(message, wire.PullRows):
            self.tables.require_wanted(message)
        elif not isinstance(message, wire.Pull):
            self.buckets.table(message.id)
        return self._answer(self.waiting.park(peer, message))

    def publish(self, _: bytes, message: wire.Publish) -> wire.PublishNoted:
        # A worker that was started again goes on for itself, when none is lost any more.
        self.publishing.begin(message, bool(self.waiting.lost) or message.node.incarnation > 1)
        return wire.PublishNoted(message.seq, self.publishing.last)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        use = self.tables.updaters(optimizer)
        self.updates.set_optimizer(optimizer)
        use()

    def close(self, error: Exception) -> list[Answer]:
        self.tables.freezes.close()
        parked, inside_join = self.waiting.close()
        waiters = [(waiter.peer, waiter.request) for waiter in parked] + inside_join
        return [refuse(peer, request, error) for peer, request in waiters]

    def depart(self, workers: Collection[int], lost: Collection[int] = ()) -> list[Answer]:
        """Go on without ``workers``, which have left in order, and those that are ``lost``: all until now."""
        self.waiting.depart(workers, lost)
        self.tables.freezes.depart([*workers, *lost])
        targets = self.buckets.targets()
        for target in targets:
            target.rounds.leave(self.waiting.departed)
            target.rounds.lose(self.waiting.lost)
        return self._without_pushes(targets)

    def bypass(self, aggregator: wire.Node, ranks: Collection[int], back: Collection[int]) -> None:
        """Go on without ``aggregator``, which is lost: the workers ``ranks`` repeat what it has not answered.

        What it has contributed to open rounds is forgotten. Those of ``back`` have sent here themselves.
        """
        self.waiting.forget(aggregator)
        for bucket in self.buckets.all():  # rows of tables do not go through aggregators
            rounds = bucket.rounds
            rounds.withdraw(ranks, back)
            if isinstance(rounds, WorkerClocks):
                made = {rank: rounds.made(rank) for rank in ranks}
                for number in bucket.ids:
                    self._counted[number] = {**self._counted.get(number, {}), **made}

    def _has_counted(self, message: wire.Push) -> bool:
        """Whether a worker repeats a push that its host's aggregator had brought before it was lost."""
        if message.node.role != "worker" or not message.ids:
            return False
        # One segment tells of all, because the aggregator has sent on each message whole.
        last, missing = self._counted.get(message.ids[0], {}).get(message.node.rank, (0, ()))
        return message.clocks[0] <= last and message.clocks[0] not in missing

    def admit(self, message: wire.Admit) -> list[Answer]:
        """Let a worker that was started again into the rounds after those that another worker has pushed."""
        self.waiting.lost -= {message.rank}
        self._newcomers = [*(rank for rank in self._newcomers if rank != message.rank), message.rank]
        clocks = dict(zip(message.ids, message.clocks, strict=True))
        self.buckets.apart(clocks)
        targets = self.buckets.targets()
        for target in targets:
            target.rounds.admit(message.rank, clocks.get(target.ids[0], 0))
        self.admissions = [
            each for each in self.admissions if each.rank != message.rank and any(t.rounds.partial for t in targets)
        ]
        self.admissions.append(message)
        return self._advance(targets)

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
        return self._without_pushes(targets)

    def pass_rounds(self, peer: bytes, message: wire.PassRounds) -> list[Answer]:
        """Skip rounds that this server lacks and others have: those that a lost worker made alone during a join."""
        if not self._knows or not self.waiting.lost:
            raise UsageError("rounds are passed only where a worker is lost, in stores whose rounds need all workers")
        clocks = dict(zip(message.ids, message.clocks, strict=True))
        self.buckets.apart(clocks)
        targets = self.buckets.targets_of(message.ids)
        for target in targets:
            target.rounds.pass_to(clocks[target.ids[0]])
        return [Answer(peer, message, wire.Ack(message.seq)), *self._answer(self.waiting.release(targets, {}))]

    # ---- as a standby

    def follow_rounds(self, message: wire.ClosedRounds | wire.ClosedRowRounds) -> list[Answer]:
        """Close rounds as another server has; answer the workers inside ``join``, if it is over."""
        began = 0.0 if self.tracer is None else self.tracer.clock()
        if isinstance(message, wire.ClosedRounds):
            self.updates.follow(message)
        else:
            self.tables.updates.follow(message, self.buckets.tables_of(message.ids))
        if self.tracer is not None:
            self._note(self.tracer, "follow", began, message.versions)
        return self._resume()

    def follow_updated(self, message: wire.Updated) -> list[Answer]:
        self.updates.follow_updated(message)
        return self._resume()

    # ---- rounds close, and requests are answered

    def _pushed(
        self, peer: bytes, message: PushRequest, targets: Sequence[AnyTarget], late: int, error: Exception | None
    ) -> list[Answer]:
        """Answer a push, or let it wait, and close the rounds of ``targets`` that it completes."""
        if error is not None:
            answers = [refuse(peer, message, error)]
        else:
            # Parked before rounds are closed, so that it learns of their errors.
            answers = self._answer(self.waiting.park(peer, message, late, targets))
        answers += self._contributed(message, targets)
        if self.pauses.ranks:
            answers += self._resume()
        return answers

    def _contributed(self, message: PushRequest, targets: Sequence[AnyTarget]) -> list[Answer]:
        """Close the rounds of ``targets`` that a push has completed, and answer the requests that waited for them."""
        answers = self._advance(targets, message)
        if self._sync and targets:
            self._times.contributed(message.workers, message.clocks[0], targets, self.rule.quorum is not None)
        return answers

    def _advance(self, touched: Sequence[AnyTarget], push: PushRequest | None = None) -> list[Answer]:
        """Close the rounds of ``touched`` that are complete, and answer the requests that waited for them.

        ``push`` has changed ``touched``, if one has.
        """
        if not self._sync:
            ready = self.waiting.release(touched, {})
            if push is not None:
                self._times.updated(_behind_most(push), touched, ready)
            if self.buckets.doubts:
                ready += self.waiting.give_up_hopeless()
            return self._answer(ready)
        answers: list[Answer] = []
        if self.publishing.pending:  # here for a server that has just taken over, see ``reached``
            self.publishing.reached(touched)
        # One wave is all rounds that are complete now: one call of the optimizer for them. When a round has closed, the
        # next one of its target may be complete already, for workers push ahead.
        while wave := [
            (target, contributions)
            for target in touched
            if (self.grace is None or self.grace.over(target, self._times.now))
            and (contributions := target.rounds.complete()) is not None
        ]:
            if self._newcomers and self.rule.quorum is None:
                wave = [(target, self._without_strays(target, contributions)) for target, contributions in wave]
            whole = [(target, contributions) for target, contributions in wave if isinstance(target, Bucket)]
            striped: list[tuple[RowTarget, list[Any]]] = []
            if len(whole) < len(wave):
                striped = [(target, contributions) for target, contributions in wave if isinstance(target, RowTarget)]
            if self.captures:  # the thread copies the state before this update; what it has not come to is copied here
                self.captures.secure([bucket for bucket, _ in whole])
            errors: dict[Any, Exception] = {}
            began = 0.0 if self.tracer is None else self.tracer.clock()
            if whole:
                errors.update(self.updates.close(whole))
            if striped:
                errors.update(self.tables.updates.close(striped))
            for target, contributions in wave if len(whole) + len(striped) < len(wave) else ():
                if isinstance(target, TableGroup):
                    error = self.tables.updates.close_group(target, contributions)
                    if error is not None:
                        errors[target] = error
            if self.captures:
                self.captures.reached([target for target, _ in wave])
            if self.publishing.pending:
                self.publishing.reached([target for target, _ in wave])
            if self.first_sums is not None and self.updates.optimizer is None:
                for bucket, _ in whole:
                    self.first_sums.note(bucket)
            touched = [target for target, _ in wave]  # no other has a round that is complete now
            if self.tracer is not None:
                self._note(self.tracer, "update", began, [target.rounds.version for target in touched], touched)
            answers += self._answer(self.waiting.release(touched, errors))
        if self.buckets.doubts:  # others may have pushed further already
            answers += self._answer(self.waiting.give_up_hopeless())
        return answers

    def _without_strays(self, target: AnyTarget, contributions: Sequence[Any]) -> list[Any]:
        """Return the contributions that count in a round that is over, and fail the pushes of the strays alone."""
        errors = strays(contributions, self._newcomers, target.segments.keys)
        if not errors:
            return list(contributions)
        target.rounds.omit(errors)
        target.fail_pushes(errors)
        return [each for each in contributions if errors.keys().isdisjoint(each.ranks)]

    def tick(self) -> list[Answer]:
        """Close the rounds that have waited for late workers for long enough."""
        if self.grace is None or self.grace.due is None or self._times.now < self.grace.due:
            return []
        self.grace.due = None
        targets = self.buckets.targets()
        answers = self._advance(targets) + self._resume()
        self._times.closed(targets)
        return answers

    def _without_pushes(self, targets: Sequence[AnyTarget]) -> list[Answer]:
        """Go on now that workers will not push for some time, or ever: close rounds, and give up what waits in vain."""
        return self._advance(targets) + self._answer(self.waiting.give_up_hopeless()) + self._resume()

    def _note(
        self, tracer: Tracer, name: str, began: float, rounds: Sequence[int], targets: Sequence[AnyTarget] = ()
    ) -> None:
        """Trace an update of ``targets`` since ``began``, if these rounds of them are of interest."""
        if rounds and tracer.reached(rounds[0]):
            tracer.span(name, began, targets[0].segments.keys if targets else (), round_=rounds[0])

    def _answer(self, ready: Iterable[ParkedRequest]) -> list[Answer]:
        """Answer requests that need not wait. One that cannot be answered fails alone."""
        answers: list[Answer] = []
        alike: tuple[SharedFields, wire.Values] | None = None  # the last answer in rounds, and what has asked for it
        for parked in ready:
            request = parked.request
            shared = request.shared if isinstance(request, wire.Push) else None
            if alike is not None and alike[0] is shared and parked.error is None and parked.late == alike[1].missed:
                answers.append(Answer(parked.peer, request, alike[1].again(request.seq)))
                continue
            answer = self._answer_one(parked)
            answers.append(answer)
            if shared is not None and self._sync and isinstance(answer.reply, wire.Values):
                alike = shared, answer.reply
        return answers

    def _answer_one(self, parked: ParkedRequest) -> Answer:
        if parked.error is not None:
            return refuse(parked.peer, parked.request, parked.error)
        try:
            return Answer(parked.peer, parked.request, self._reply(parked.request, parked.late))
        except (UsageError, WeightsInDoubt) as exc:
            return refuse(parked.peer, parked.request, exc)

    def _reply(self, message: WaitingRequest, late: int) -> wire.Reply:
        if self.buckets.doubts:
            self.buckets.require_sound(message.ids)
        ahead = 0 if self._sync else self._ahead(message)
        if isinstance(message, OF_ARRAYS):
            return self.values.reply(message, late, ahead)
        if isinstance(message, OF_ROWS):
            return self.tables.reply(message, late, ahead)
        if isinstance(message, wire.FreezeTable):
            return self.tables.freezes.freeze(message, self.buckets.table(message.id))
        self.tables.evict(message)
        return wire.Ack(message.seq)

    def _ahead(self, message: WaitingRequest) -> int:
        """Return how many pushes the asker is ahead of the slowest worker."""
        if not message.ids:
            return 0
        if len(message.ids) == 1:
            return max(0, message.clocks[0] - self.buckets.target(message.ids[0]).rounds.version)
        clock = max(message.clocks)
        return max(0, clock - min(target.rounds.version for target in self.buckets.targets_of(message.ids)))

    def _resume(self) -> list[Answer]:
        ended = self.waiting.end_join()
        if ended is None:
            return []
        waiters, last, error = ended
        if error is not None:
            return [refuse(peer, request, error) for peer, request in waiters]
        for target in self.buckets.targets():
            target.rounds.resume()
        return [
            Answer(peer, request, wire.Resume(request.seq, last, self.buckets.versions(request.ids)))
            for peer, request in waiters
        ]

    def _new_rounds(self) -> Rounds[Any] | WorkerClocks[Any]:
        made: Rounds[Any] | WorkerClocks[Any]
        if self.rule.mode == "async":
            made = WorkerClocks(self._workers)
        else:
            made = Rounds(self._workers, 0, self.rule.quorum, self.rule.late == "keep", self._number)
        made.leave(self.waiting.departed)
        made.lose(self.waiting.lost)
        return made


def _behind_most(message: PushRequest) -> Sequence[int]:
    """Return the workers of a push that have pushed least."""
    own = message.rank_clocks if isinstance(message, wire.Push) else ()
    if not own:
        return message.workers
    return [rank for rank, clock in zip(message.workers, own, strict=True) if clock == min(own)]
