"""What contributions do to one store's buckets: their sum is assigned, or the optimizer steps with it. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch

from kvstore.errors import Mismatch, ServerError, UsageError, WeightsInDoubt
from kvstore.optim.fused import FusedGroup
from kvstore.optim.optimizer import Optimizer, log_replaced
from kvstore.optim.updater import Updater
from kvstore.rule import Rule
from kvstore.spec import Key, require_floats, shorten
from kvstore.transport.memory import Memory
from kvstore.values import from_buffer, sum_ranges
from servers.store.bucket import Bucket, Contribution
from servers.store.buckets import Buckets
from servers.store.finite import require_finite
from servers.store.hyperparameters import UpdateHyperparameters, agreed
from servers.store.rounds import Rounds

# what to update, by what, with which numbers
Update: TypeAlias = tuple[Bucket, list[Contribution], UpdateHyperparameters]


class Updates:
    """The updates of one store.

    Args:
        rule: of the store.
        buckets: of the store.
        memory: for sums.

    Attributes:
        updater: applies the optimizer; None if sums are assigned.
    """

    def __init__(self, rule: Rule, buckets: Buckets, memory: Memory) -> None:
        self.updater: Updater | None = None
        self._rule = rule
        self._buckets = buckets
        self._memory = memory
        self._groups: WeakKeyDictionary[Bucket, FusedGroup] = WeakKeyDictionary()

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer; None if sums are assigned."""
        return None if self.updater is None else self.updater.optimizer

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

    def regroup(self) -> None:
        """Forget how weights are grouped for the optimizer: the grouping, or which of them have state, may change."""
        self._groups.clear()

    def require(self, buckets: Sequence[Bucket]) -> None:
        """Raise ``UsageError`` or ``Mismatch`` unless pushes to ``buckets`` can be applied."""
        if self.updater is not None:
            require_floats((bucket.segments.keys[0], bucket.segments.specs[0]) for bucket in buckets)
        elif self._rule.mode == "async":
            raise UsageError("a push to an async store needs an optimizer: call set_optimizer(name, ...) first")

    def close(self, wave: Sequence[tuple[Bucket, list[Contribution]]]) -> dict[Bucket, Exception]:
        """Sum the contributions of rounds and update; return the errors. A round that fails is over, too."""
        errors: dict[Bucket, Exception] = {}
        updates: list[Update] = []
        for bucket, items in wave:
            try:
                updates.append((bucket, items, _agreed(bucket, items)))
            except Mismatch as exc:
                errors[bucket] = exc
        return errors | self.make(updates)

    def make(self, updates: Sequence[Update]) -> dict[Bucket, Exception]:
        """Make ``updates``: one call of the optimizer for all that have the same hyper-parameters.

        Returns:
            The errors, by bucket; such a bucket is unchanged.

        Raises:
            WeightsInDoubt: see ``Updater.step``.
        """
        if self.updater is None:
            return self._assign(updates)
        # A round's hyper-parameters come from its own contributions, not from whichever round was closed before it.
        default = self.updater.optimizer if self._rule.mode == "sync" else self.updater
        by_hyper: dict[UpdateHyperparameters, list[tuple[Bucket, list[Contribution]]]] = {}
        for bucket, items, hyper in updates:
            by_hyper.setdefault(hyper, []).append((bucket, items))
        errors: dict[Bucket, Exception] = {}
        for (lr, rescale, changes), members in by_hyper.items():
            self.updater.lr = default.lr if lr is None else lr
            self.updater.rescale_grad = default.rescale_grad if rescale is None else rescale
            self.updater.changes = dict(changes)
            errors |= self._step(self.updater, members)
        return errors

    def _assign(self, updates: Sequence[Update]) -> dict[Bucket, Exception]:
        errors: dict[Bucket, Exception] = {}
        for bucket, items, _ in updates:
            try:
                bucket.assign([item.ranges for item in items], self._scale(bucket, items), self._check(bucket, items))
            except Exception as exc:
                errors[bucket] = exc
        return errors

    def _step(self, updater: Updater, members: Sequence[tuple[Bucket, list[Contribution]]]) -> dict[Bucket, Exception]:
        groups: dict[Bucket, FusedGroup] = {}
        totals: list[torch.Tensor] = []
        errors: dict[Bucket, Exception] = {}
        for bucket, items in members:
            try:
                bucket.writable()
                group = self._groups.get(bucket)
                if group is None:
                    group = self._groups[bucket] = updater.group(bucket.ids, bucket.shapes, bucket.value)
                group.point(bucket.value)
                total = self._corrected(updater, bucket, items, group.params[0].dtype)
                if (check := self._check(bucket, items)) is not None:
                    check(total)
            except Exception as exc:
                errors[bucket] = exc
                continue
            groups[bucket] = group
            totals.append(total)
        if not groups:
            return errors
        try:
            updater.step(list(groups.values()), totals)
        except WeightsInDoubt:
            raise
        except Exception as exc:
            errors |= dict.fromkeys(groups, _none_made(exc, groups))
        return errors

    def _check(self, bucket: Bucket, items: Sequence[Contribution]) -> Callable[[torch.Tensor], None] | None:
        """Return a function that raises ``NotFinite`` if a sum of ``items`` is not finite; None if nobody checks."""
        if not self._rule.finite or not bucket.value.is_floating_point():
            return None
        return partial(require_finite, bucket, items)

    def _corrected(
        self, updater: Updater, bucket: Bucket, items: Sequence[Contribution], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the gradient to update a bucket with."""
        total = self._total(updater, bucket, items).to(dtype)
        if (scale := self._scale(bucket, items)) != 1:
            total = total * scale
        before = bucket.read_by.get(items[0].ranks[0]) if self._rule.compensation else None
        if before is None:
            return total
        # Delay compensation: what others have changed since, with the gradient's square for its curvature.
        drift = bucket.value.to(dtype) - before.to(dtype)
        return total + self._rule.compensation * updater.rescale_grad * total * total * drift

    def _scale(self, bucket: Bucket, items: Sequence[Contribution]) -> float:
        """Return the factor for the sum of a quorum's contributions: as if each worker of the round had contributed."""
        rounds = bucket.rounds
        if self._rule.quorum is None or not isinstance(rounds, Rounds):
            return 1.0
        return rounds.share / sum(len(item.ranks) for item in items)

    def _total(self, updater: Updater, bucket: Bucket, items: Sequence[Contribution]) -> torch.Tensor:
        """Return the sum of ``items``, in memory to be overwritten; or a single one's own memory, if only read."""
        if len(items) == 1 and len(items[0].ranges) == 1 and updater.reads_only():
            return items[0].ranges[0].values
        # From the store's memory, which reuses blocks: fresh pages would cost more than the sum.
        total = from_buffer(self._memory.allocate(bucket.size * bucket.value.itemsize), bucket.dtype)
        sum_ranges([item.ranges for item in items], total)
        return total

    def _key(self, number: Key) -> Key:
        bucket, place = self._buckets.find(int(number))
        return bucket.segments.keys[place]


def _none_made(exc: Exception, buckets: Collection[Bucket]) -> ServerError:
    keys = dict.fromkeys(key for bucket in buckets for key in bucket.segments.keys)
    error = ServerError(f"{type(exc).__name__}: {exc}; no array of this update of {shorten(keys)} has changed")
    error.__cause__ = exc
    return error


def _agreed(bucket: Bucket, items: Sequence[Contribution]) -> UpdateHyperparameters:
    if all(item.hyper == items[0].hyper for item in items):
        return items[0].hyper
    return agreed({item.who: item.hyper for item in items}, dict.fromkeys(bucket.segments.keys))
