"""Updates of one store's arrays: contributions are checked and summed; the sum is assigned, or the optimizer steps.

A value has one name at each step: the ``ranges`` of a push are its ``Contribution``; contributions are ``summed``; the
sum, scaled and corrected, is the ``gradient``; the optimizer changes the bucket's ``value`` with it. No I/O.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from kvstore import wire
from kvstore.codecs import CheckedPayload, Compression
from kvstore.codecs.described import check_payloads
from kvstore.codecs.options import described
from kvstore.errors import Mismatch, NotFinite, ServerError, UsageError, WeightsInDoubt, rebuild
from kvstore.optim.fused import FusedGroup
from kvstore.optim.optimizer import Optimizer, log_replaced
from kvstore.optim.states import SegmentState, pack_states, unpack_parts, unpack_states
from kvstore.optim.updater import NO_CHANGES, RowHyperparameters, Updater
from kvstore.rows.sums import Room
from kvstore.rule import Rule
from kvstore.spec import FLOATS, ITEMSIZE, Key, require_floats, shorten, sum_dtype
from kvstore.transport.memory import Memory
from kvstore.values import (
    PayloadRange,
    RowRange,
    TensorRange,
    all_finite,
    as_dtype,
    cut,
    from_buffer,
    one_thread,
    ranges_of,
    sum_ranges,
)
from servers.names import workers
from servers.store.array_rows import apart, is_rows, rows_of, summed
from servers.store.bucket import Bucket, Contribution
from servers.store.buckets import Buckets
from servers.store.hyperparameters import UpdateHyperparameters, agreed_by, asked, compressions
from servers.store.recording import HandOver, Recording, interval
from servers.store.rounds import Rounds
from servers.store.target import AnyTarget, HeldSegments, PushRequest


class Update(NamedTuple):
    """A bucket, the contributions whose sum times ``scale`` updates it, and the numbers to update it with."""

    bucket: Bucket
    contributions: list[Contribution]
    hyper: UpdateHyperparameters
    scale: float = 1.0


class Updates:
    """The updates of one store; ``updater`` applies the optimizer, and is None where sums are assigned."""

    def __init__(self, rule: Rule, buckets: Buckets, memory: Memory, recording: Recording) -> None:
        self.updater: Updater | None = None
        self._rule = rule
        self._buckets = buckets
        self._memory = memory
        self._recording = recording
        self._hand_over = HandOver()
        self._groups: WeakKeyDictionary[Bucket, FusedGroup] = WeakKeyDictionary()

    @property
    def optimizer(self) -> Optimizer | None:
        return None if self.updater is None else self.updater.optimizer

    @property
    def last(self) -> UpdateHyperparameters:
        """What the next push of an async store is an update with, unless it says otherwise; in rounds, nothing is."""
        if self.updater is None or self._rule.mode == "sync":
            return UpdateHyperparameters()
        return UpdateHyperparameters(self.updater.lr, self.updater.rescale_grad, tuple(self.updater.changes.items()))

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Update with ``optimizer`` from now on; its state stays if the update rule is the same."""
        self.regroup()
        if self.updater is not None and optimizer.same_rule(self.updater.optimizer):
            self.updater.configure(optimizer)
            return
        new = Updater(optimizer, self._key)
        require_floats((bucket.segments.keys[0], bucket.segments.specs[0]) for bucket in self._buckets.all())
        log_replaced(self.optimizer, optimizer)
        self.updater = new

    def restore(self, optimizer: Optimizer, last: UpdateHyperparameters) -> None:
        """Update with ``optimizer`` from now on, as another server does; its last updates were made with ``last``."""
        updater = self.updater = Updater(optimizer, self._key)
        updater.lr = optimizer.lr if last.lr is None else last.lr
        updater.rescale_grad = optimizer.rescale_grad if last.rescale is None else last.rescale
        updater.changes = dict(last.changes)

    def regroup(self) -> None:
        """Forget how weights are grouped for the optimizer: the grouping, or which of them have state, may change."""
        self._groups.clear()

    def require(self, buckets: Sequence[Bucket]) -> None:
        """Raise ``UsageError`` or ``Mismatch`` unless pushes to ``buckets`` can be applied."""
        if self.updater is not None:
            require_floats((bucket.segments.keys[0], bucket.segments.specs[0]) for bucket in buckets)
        else:
            self.require_optimizer()

    def require_optimizer(self) -> None:
        if self.updater is None and self._rule.mode == "async":
            raise UsageError("a push to an async store needs an optimizer: call set_optimizer(name, ...) first")

    def close(self, wave: Sequence[tuple[Bucket, list[Contribution]]]) -> dict[Bucket, Exception]:
        """Sum the contributions of rounds and update; return the errors. A round that fails is over, too."""
        errors: dict[Bucket, Exception] = {}
        updates: list[Update] = []
        for bucket, contributions in wave:
            if (doubt := self._buckets.doubt_of(bucket.ids)) is not None:
                errors[bucket] = doubt
                continue
            try:
                hyper = agreed_by(contributions, bucket.segments.keys, self._rule)
                scale = 1.0
                weights = [each.weight for each in contributions]
                if weights.count(weights[0]) < len(weights) and bucket.dtype in FLOATS:
                    contributions, weight = weighed(contributions, sum_dtype(bucket.dtype))
                    scale = bucket.rounds.factor(weight, True)
                elif bucket.rounds.partial:  # else thousands of contributions need not be counted
                    scale = bucket.rounds.factor(sum(len(each.ranks) for each in contributions))
                updates.append(Update(bucket, contributions, hyper, scale))
            except Mismatch as exc:
                errors[bucket] = exc
        recording = self._recording if self._recording.on else None
        if errors and recording is not None:  # rounds that failed are over on the standby, too
            recording.values([], errors)
        made = self.make(updates, recording)
        return errors | made if errors else made

    def make(self, updates: Sequence[Update], recording: Recording | None = None) -> dict[Bucket, Exception]:
        """Make ``updates``: one call of the optimizer for all that have the same hyper-parameters.

        ``recording`` records them if they close rounds. The errors are by bucket; such a bucket is
        unchanged, unless it is ``WeightsInDoubt``.
        """
        errors: dict[Bucket, Exception] = {}
        if self._buckets.doubts:
            doubts = {update.bucket: self._buckets.doubt_of(update.bucket.ids) for update in updates}
            errors |= {bucket: doubt for bucket, doubt in doubts.items() if doubt is not None}
            updates = [update for update in updates if update.bucket not in errors]
        if self.updater is None:
            return errors | self._assign(updates, recording)
        by_hyper: dict[UpdateHyperparameters, list[Update]] = {}
        for update in updates:
            by_hyper.setdefault(update.hyper, []).append(update)
        for hyper, members in by_hyper.items():
            self.take(hyper)
            whole: list[Update] = []
            for update in members:
                if is_rows(update.contributions[0].ranges) and self._is_lazy(self.updater, update):
                    errors |= self._step_rows(self.updater, update, recording)
                else:
                    whole.append(update)
            if whole:
                errors |= self._step(self.updater, whole, recording)
        return errors

    def take(self, hyper: UpdateHyperparameters) -> None:
        """Update with ``hyper`` next: what it does not say is the optimizer's own, or in an async store as it was."""
        if self.updater is None:
            return
        # A round's hyper-parameters come from its own contributions, not from whichever round was closed before it.
        default = self.updater.optimizer if self._rule.mode == "sync" else self.updater
        self.updater.lr = default.lr if hyper.lr is None else hyper.lr
        self.updater.rescale_grad = default.rescale_grad if hyper.rescale is None else hyper.rescale
        self.updater.changes = dict(hyper.changes)

    def row_hyperparameters(self, hyper: UpdateHyperparameters) -> RowHyperparameters:
        """Return what rows are updated with. In an async store, None takes the last number that was given."""
        changes = dict(hyper.changes) if hyper.changes else NO_CHANGES
        if self._rule.mode == "sync" or self.updater is None:
            return RowHyperparameters(hyper.lr, hyper.rescale, changes)
        self.take(hyper)
        return RowHyperparameters(self.updater.lr, self.updater.rescale_grad, changes)

    def get_states(self, message: wire.GetStates) -> wire.OptimizerStates:
        """Return copies of the states that ``message`` asks for: updates change them in place. Rows keep their own."""
        for number in message.ids:
            self._buckets.target(number)
        states = {} if self.updater is None else self.updater.states.of(message.ids)
        copies = [SegmentState(int(number), name, value.detach().clone()) for (number, name), value in states.items()]
        rule = None if self.updater is None else self.updater.optimizer.rule
        return wire.OptimizerStates(message.seq, optimizer=rule, **pack_states(copies))

    def put_states(self, message: wire.PutStates) -> None:
        if self.updater is None:
            raise UsageError("the servers have no optimizer to load states for; call set_optimizer first")
        weights: dict[Key, torch.Tensor] = {
            number: self._buckets.value(number) for number in dict.fromkeys(message.ids)
        }
        states: dict[tuple[Key, str], torch.Tensor] = {
            (number, name): value for number, name, value in unpack_states(message)
        }
        self.regroup()
        self.updater.states.load(states, weights)

    def follow(self, message: wire.ClosedRounds) -> None:
        """Close rounds that another server has recorded."""
        buckets = self._buckets.group(message.ids, message.sizes)
        failures = {place: rebuild(kind, text) for place, kind, text in message.failures}
        if message.runs and len(buckets) != 1:
            raise ValueError(f"rows of {len(buckets)} buckets in one record")
        if not message.runs and len(message.buffers) + len(failures) != len(buckets):
            raise ValueError(f"{len(message.buffers)} sums for {len(buckets)} buckets, {len(failures)} without")
        if message.buffers and message.assigned != (self.updater is None):
            raise ValueError("sums are assigned on one server, and the optimizer steps on the other")
        hyper = UpdateHyperparameters.of(message)
        buffers = iter(message.buffers)
        updates: list[Update] = []
        for place, (bucket, version) in enumerate(zip(buckets, message.versions, strict=True)):
            if not isinstance(bucket.rounds, Rounds):
                raise ValueError("a closed round of a store without rounds")
            bucket.rounds.follow(version, message.contributors[place] if message.contributors else ())
            if place in failures:
                bucket.fail(version, failures[place])
                continue
            dtype = bucket.dtype if message.assigned else sum_dtype(bucket.dtype)
            ranges: Sequence[PayloadRange]
            if message.runs:
                ranges = rows_of("another server", message.runs, message.buffers, bucket.segments, dtype)
            else:
                ranges = ranges_of([next(buffers)], dtype, bucket.size)
            contribution = Contribution((), version, ranges, hyper)
            updates.append(Update(bucket, [contribution], hyper, message.scales[place] if message.scales else 1.0))
        if message.assigned:
            for update, buffer in zip(updates, message.buffers, strict=True):
                update.bucket.adopt(buffer)
            return
        for bucket, error in self.make(updates).items():
            bucket.fail(bucket.rounds.version, error)

    def follow_updated(self, message: wire.Updated) -> None:
        """Take the results of updates on another server, with all rounds up to then."""
        if self.updater is None:
            raise ValueError("what an optimizer has made, and there is none")
        buckets = self._buckets.group(message.ids, message.sizes)
        shapes = {number: shape for bucket in buckets for number, shape in zip(bucket.ids, bucket.shapes, strict=True)}
        states = unpack_parts(message, message.buffers[len(buckets) :], shapes)
        for bucket, version, buffer in zip(buckets, message.versions, message.buffers[: len(buckets)], strict=True):
            if isinstance(bucket.rounds, Rounds):
                bucket.rounds.reach(version)
            bucket.adopt(buffer)
            bucket.changes = version
        if states:
            self.regroup()
            self.updater.states.restore(states)

    def _assign(self, updates: Sequence[Update], recording: Recording | None) -> dict[Bucket, Exception]:
        errors: dict[Bucket, Exception] = {}
        for bucket, contributions, hyper, scale in updates:
            factor = scale if hyper.rescale is None else scale * hyper.rescale
            try:
                bucket.assign([each.ranges for each in contributions], factor, self._check(bucket, contributions))
            except Exception as exc:
                errors[bucket] = exc
        if recording is not None and updates:
            recording.values([update.bucket for update in updates if update.bucket not in errors], errors)
        return errors

    def _step(
        self, updater: Updater, members: Sequence[Update], recording: Recording | None
    ) -> dict[Bucket, Exception]:
        groups: dict[Bucket, FusedGroup] = {}
        sums: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        errors: dict[Bucket, Exception] = {}
        for update in members:
            bucket = update.bucket
            try:
                bucket.writable()  # it may move: so the optimizer's views are pointed to it each time
                group = self._group(updater, bucket)
                group.point(bucket.value)
                summed = self._sum(updater, update)
                gradient = self._corrected(updater, update, summed)
                if (check := self._check(bucket, update.contributions)) is not None:
                    check(gradient)
            except Exception as exc:  # nothing of this bucket has changed: the other buckets go on without it
                errors[bucket] = exc
                continue
            groups[bucket] = group
            sums.append(summed)
            gradients.append(gradient)
        buckets = list(groups) if self._recording.on else []
        every = 0
        if recording is not None:
            hyper = members[0].hyper
            every = 0 if errors else self._interval(updater, buckets)
            if all(map(operator.is_, sums, gradients)):  # neither server has to copy them to do so
                updater.rescale(sums)
                hyper = hyper._replace(rescale=1.0)
            scales = [update.scale for update in members if update.bucket in groups]
            kept = self._hand_over.keeps(buckets, every)
            # Before the step: the standby steps at the same time, not after it. If this process dies in the middle, the
            # standby has the whole round.
            recording.sums(buckets, sums, scales, hyper, errors, kept)
        if not groups:
            return errors
        try:
            updater.step(list(groups.values()), gradients, keep=recording is not None)
        except Exception as exc:
            errors |= self._failed(exc, groups)
            self._hand_over.fail()
        else:
            if self._recording.on and (updater.optimizer.random or self._hand_over.due(buckets, every)):
                self._recording.updated(
                    buckets, updater.states.parts([id_ for bucket in buckets for id_ in bucket.ids])
                )
        return errors

    def _is_lazy(self, updater: Updater, update: Update) -> bool:
        """Whether all contributions have some rows only, and the optimizer leaves all others as they are."""
        if not all(is_rows(each.ranges) for each in update.contributions):
            return False
        return updater.lazy(self._group(updater, update.bucket))

    def _step_rows(self, updater: Updater, update: Update, recording: Recording | None) -> dict[Bucket, Exception]:
        """Make one update of the rows that workers have pushed."""
        bucket, dtype = update.bucket, sum_dtype(update.bucket.dtype)
        try:
            bucket.writable()
            group = self._group(updater, bucket)
            group.point(bucket.value)
            payloads = [each.ranges for each in update.contributions]
            plain = update.scale == 1 and not (recording is not None or self._rule.finite or self._rule.compensation)
            gradient = apart(payloads, dtype) if plain else None
            if gradient is None:
                gradient = [self._summed_rows(updater, update, None if recording is None else recording.room)]
        except Exception as exc:  # nothing has changed
            if recording is not None:
                recording.values([], {bucket: exc})
            return {bucket: exc}
        if recording is not None:
            self._hand_over.keeps([bucket], 0)  # so the standby makes the updates that it has kept, and then this one
            recording.rows(bucket, gradient[0], update.hyper)
        try:
            updater.step_rows(group, gradient, keep=True)
        except Exception as exc:
            self._hand_over.fail()
            return self._failed(exc, [bucket])
        return {}

    def _group(self, updater: Updater, bucket: Bucket) -> FusedGroup:
        group = self._groups.get(bucket)
        if group is None:
            group = self._groups[bucket] = updater.group(bucket.ids, bucket.shapes, bucket.value)
        return group

    def _summed_rows(self, updater: Updater, update: Update, room: Room | None) -> list[RowRange]:
        """Return the gradient for a bucket, whose contributions are some rows."""
        bucket, payloads = update.bucket, [each.ranges for each in update.contributions]
        sums = summed(payloads, bucket.segments.keys[0], sum_dtype(bucket.dtype), room)
        gradient = [part._replace(rows=self._corrected(updater, update, part.rows, part)) for part in sums]
        if (check := self._check(bucket, update.contributions)) is not None:
            for part in gradient:
                check(part.rows)
        return gradient

    def _failed(self, exc: Exception, buckets: Collection[Bucket]) -> dict[Bucket, Exception]:
        errors: dict[Bucket, Exception] = {}
        if isinstance(exc, WeightsInDoubt):
            ids = [int(number) for number in exc.keys]
            errors = dict.fromkeys(self._buckets.of(ids), self._buckets.doubt(ids, exc))
            exc = exc.__cause__ if isinstance(exc.__cause__, Exception) else exc
        unchanged = [bucket for bucket in buckets if bucket not in errors]
        return errors | dict.fromkeys(unchanged, _none_made(exc, unchanged))

    def _interval(self, updater: Updater, buckets: Sequence[Bucket]) -> int:
        if self._rule.quorum is not None:  # who has contributed to a round is known from its record
            return 0
        round_bytes = sum(bucket.sum_bytes for bucket in buckets)
        return interval(updater.optimizer.random, self._recording.shares, round_bytes, self._buckets.sum_bytes)

    def _check(self, bucket: Bucket, contributions: Sequence[Contribution]) -> Callable[[torch.Tensor], None] | None:
        """Return a function that raises ``NotFinite`` if their sum is not finite; None if nobody checks."""
        if not self._rule.finite or not bucket.value.is_floating_point():
            return None
        return partial(_require_finite, bucket, contributions)

    def _corrected(
        self, updater: Updater, update: Update, summed: torch.Tensor, part: RowRange | None = None
    ) -> torch.Tensor:
        """Return the gradient for a bucket, whose contributions have the sum ``summed``: all, or rows of ``part``."""
        gradient = summed if update.scale == 1 else summed * update.scale
        before = update.bucket.read_by.get(update.contributions[0].ranks[0]) if self._rule.compensation else None
        if before is None:
            return gradient
        now = update.bucket.value
        if part is not None:
            places = part.window.places(part.ids)
            now, before = (places.gather(value[part.start : part.stop]) for value in (now, before))
        # Delay compensation: what others have changed since, with the gradient's square for its curvature.
        drift = now.to(gradient.dtype) - before.to(gradient.dtype)
        return gradient + self._rule.compensation * updater.rescale_grad * gradient * gradient * drift

    def _sum(self, updater: Updater, update: Update) -> torch.Tensor:
        """Return the sum of contributions, in memory to be overwritten; or a single one's own memory, if only read.

        Its dtype is that of sums, in which weights of half precision are updated, too, and records are kept.
        """
        bucket, contributions, dtype = update.bucket, update.contributions, sum_dtype(update.bucket.dtype)
        if len(contributions) == 1 and len(contributions[0].ranges) == 1 and updater.reads_only():
            values = contributions[0].ranges[0].values
            if values.dtype == as_dtype(dtype):
                return values
        # From the store's memory, which reuses blocks: fresh pages would cost more than the sum.
        summed = from_buffer(self._memory.allocate(bucket.size * ITEMSIZE[dtype]), dtype)
        sum_ranges([contribution.ranges for contribution in contributions], summed)
        return summed

    def _key(self, number: Key) -> Key:
        bucket, place = self._buckets.find(int(number))
        return bucket.segments.keys[place]


def _require_finite(bucket: Bucket, contributions: Sequence[Contribution], summed: torch.Tensor) -> None:
    """Raise ``NotFinite``, with worker, key and push, unless ``summed``, the sum of ``contributions``, is finite.

    While all is well only the sum is read: that is one pass over memory that has just been written.
    """
    if all_finite(summed):
        return
    for contribution in contributions:
        for part in contribution.ranges:
            key = _key_of(bucket, part)
            if key is not None:
                raise NotFinite(
                    f"push {contribution.clock} of {key!r} by {contribution.who} has NaN or infinite elements; "
                    "its segment has not been updated"
                )
    keys = ", ".join(repr(key) for key in dict.fromkeys(bucket.segments.keys[:3]))
    dtype = str(summed.dtype).removeprefix("torch.")
    raise NotFinite(
        f"push {contributions[0].clock} of {keys}: each worker's values are finite, their sum is not in {dtype}; "
        "its segment has not been updated"
    )


def _key_of(bucket: Bucket, part: PayloadRange) -> int | str | None:
    """Return the key of the first segment with elements in ``part`` that are not finite; None if all are."""
    values = part.values
    if all_finite(values):
        return None
    for key, start, size in zip(bucket.segments.keys, bucket.starts, bucket.sizes, strict=True):
        first, last = max(start, part.start), min(start + size, part.stop)
        if first < last and not all_finite(values[first - part.start : last - part.start]):
            return key
    return None


def _none_made(exc: Exception, buckets: Collection[Bucket]) -> ServerError:
    keys = dict.fromkeys(key for bucket in buckets for key in bucket.segments.keys)
    error = ServerError(f"{type(exc).__name__}: {exc}; no array of this update of {shorten(keys)} has changed")
    error.__cause__ = exc
    return error


def require_mergeable(message: wire.Push, rule: Rule) -> None:
    """Raise ``UsageError`` unless the pushes of several workers may be one in this store."""
    own = message.rank_clocks
    if rule.mode == "sync" and not own:
        return
    what = f"{message.node} sent the sum of pushes of {workers(message.ranks)}"
    if rule.mode == "sync":
        raise UsageError(f"{what} at clocks of their own, {own}; all pushes of one round have one clock")
    if rule.aggregate != "host":
        raise UsageError(f"{what}; in this store each push is an update, unless it has aggregate='host'")
    if own and any(clock != max(own) for clock in message.clocks):
        raise UsageError(f"{what} at clocks {own}, and clocks={message.clocks}, which must be the highest of them")
    if own and message.want and rule.staleness is not None and min(own) < max(own):
        # The worker behind would wait for what the one ahead needs, which may be its own next push.
        raise UsageError(f"{what} at clocks {own}, and wants one answer; with a staleness, each pulls its own")


def updates_of(message: wire.Push, buckets: Sequence[Bucket], rule: Rule, optimizer: Optimizer | None) -> list[Update]:
    """Return what a push contributes to each of ``buckets``, which together are its segments."""
    ranks = message.workers
    ranges: Sequence[PayloadRange] = payload_of(message, buckets)
    hyper = asked(message, optimizer)
    if rule.mode == "sync" and rule.quorum is None:  # else a late push may be of a round before a change
        pushed, back = compressions(message)
        hyper = hyper._replace(pushed=pushed, back=back)
    updates: list[Update] = []
    place = start = 0
    whole = len(buckets) == 1
    for bucket in buckets:
        clock = message.clocks[place]  # the number of the push among each worker's pushes to the bucket
        own = ranges if whole else cut(ranges, start, start + bucket.size)
        bucket.require_open(ranks, clock)
        updates.append(Update(bucket, [Contribution(ranks, clock, own, hyper, message.weight)], hyper))
        place += len(bucket.ids)
        start += bucket.size
    return updates


def weighed(contributions: Sequence[Contribution], dtype: str) -> tuple[list[Contribution], float]:
    """Return ``contributions`` times their weights, in ``dtype``, and the sum of the weights over their workers."""
    total, scaled = 0.0, []
    for each in contributions:
        weight = 1.0 if each.weight is None else each.weight
        total += weight * len(each.ranks)
        # Multiplied apart from the sum: torch's fused multiply-add rounds the last elements otherwise than the others.
        ranges = [TensorRange(part.start, part.values.to(as_dtype(dtype)) * weight) for part in each.ranges]
        scaled.append(replace(each, ranges=ranges))
    return scaled, total


def contribute(message: PushRequest, target: AnyTarget, contribution: Any) -> None:
    own = message.rank_clocks if isinstance(message, wire.Push) else ()
    if not own:
        target.rounds.contribute(contribution.ranks, contribution.clock, contribution)
        return
    for rank, clock in zip(contribution.ranks, own, strict=True):
        target.rounds.contribute((rank,), clock, contribution)


def payload_of(message: wire.Push, buckets: Sequence[Bucket]) -> Sequence[PayloadRange]:
    """Return the elements of a push to ``buckets``, checked."""
    if not buckets:
        return []
    if message.runs:
        segments = HeldSegments.joined([bucket.segments for bucket in buckets])
        return rows_of(message.node, message.runs, message.buffers, segments, message.dtype(buckets[0].dtype))
    compression = described(message.codec)
    if compression is not None:
        return _compressed(message, compression, buckets)
    return ranges_of(message.buffers, message.dtype(buckets[0].dtype), sum(bucket.size for bucket in buckets))


@dataclass(frozen=True)
class CompressedSegments:
    """Elements ``start`` to ``stop`` of a contribution, as they were sent: decoded when summed. A ``PayloadRange``."""

    start: int
    stop: int
    payload: CheckedPayload

    @property
    def values(self) -> torch.Tensor:
        out = torch.empty(self.stop - self.start, dtype=torch.float32, device="cpu")
        self.write(out, False)
        return out

    def cut(self, start: int, stop: int) -> PayloadRange:
        """Buckets are divided between segments; another worker's buffers may end within one."""
        if start <= self.start and self.stop <= stop:
            return CompressedSegments(self.start - start, self.stop - start, self.payload)
        return TensorRange(self.start, self.values).cut(start, stop)

    def write(self, out: torch.Tensor, add: bool) -> None:
        with one_thread():  # codecs work in chunks, for which to wake other threads takes longer than the work
            self.payload.write(out, add)


def _compressed(message: wire.Push, compression: Compression, buckets: Sequence[Bucket]) -> Sequence[PayloadRange]:
    dtype = buckets[0].dtype
    if dtype not in FLOATS:
        raise UsageError(f"compressed values for segments of {dtype}; compression is for floating point only")
    payloads = check_payloads(compression, message, [size for bucket in buckets for size in bucket.sizes])
    starts = itertools.accumulate((size for size, _ in payloads), initial=0)
    parts = [
        CompressedSegments(start, start + size, payload)
        for start, (size, payload) in zip(starts, payloads, strict=False)
        if size
    ]
    if sum_dtype(dtype) == "float32":  # of half precision, too: what is decoded is rounded with the sum
        return parts
    return [TensorRange(part.start, part.values.to(getattr(torch, dtype))) for part in parts]
