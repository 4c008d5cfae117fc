"""Learning rates by the number of updates: MXNet's ``lr_scheduler``, for ``optimizer_params={"lr_scheduler": ...}``.

The values are as in mxnet 1.9 and 2.0. A schedule here depends only on the number, so it gives the same values when
it is called out of order, as after resumption.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, pi

from kvstore import UsageError
from kvstore.optim.hyperparameters import finite
from workers.common.checks import at_least

__all__ = ["CosineScheduler", "FactorScheduler", "LRScheduler", "MultiFactorScheduler", "PolyScheduler"]

WARMUPS = ("linear", "constant")


def __dir__() -> list[str]:
    return list(__all__)


class LRScheduler:
    """The base of schedules. Subclasses define what follows the warm-up, in ``after_warmup``.

    Args:
        base_lr: the learning rate at the end of the warm-up. A ``learning_rate`` in ``optimizer_params`` replaces it.
        warmup_steps: the number of updates in the warm-up.
        warmup_begin_lr: the rate at the beginning of the warm-up.
        warmup_mode: ``linear``, or ``constant``, which stays at ``warmup_begin_lr``.

    Raises:
        UsageError: a number is out of range.
    """

    def __init__(
        self,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0,
        warmup_mode: str = "linear",
    ) -> None:
        self.base_lr = finite("base_lr", base_lr)
        self.warmup_steps = at_least("warmup_steps", warmup_steps, 0)
        self.warmup_begin_lr = finite("warmup_begin_lr", warmup_begin_lr)
        self.warmup_mode = warmup_mode
        if self.warmup_begin_lr > self.base_lr:
            raise UsageError(f"warmup_begin_lr={self.warmup_begin_lr:g} must be at most base_lr={self.base_lr:g}")
        if warmup_mode not in WARMUPS:
            raise UsageError(f"warmup_mode={warmup_mode!r}; choose from {', '.join(WARMUPS)}")

    def __call__(self, num_update: int) -> float:
        """Return the learning rate of update ``num_update``; the first is number 1."""
        if num_update >= self.warmup_steps:
            return self.after_warmup(num_update)
        if self.warmup_mode == "constant":
            return self.warmup_begin_lr
        return self.warmup_begin_lr + (self.base_lr - self.warmup_begin_lr) * float(num_update) / self.warmup_steps

    def after_warmup(self, num_update: int) -> float:
        """Return the learning rate of update ``num_update``, which is after the warm-up."""
        raise NotImplementedError


class FactorScheduler(LRScheduler):
    """Multiplies the rate by ``factor`` after every ``step`` updates, down to ``stop_factor_lr``.

    Args:
        step: the number of updates between two changes of the rate.
        factor: what the rate is multiplied by.
        stop_factor_lr: the least rate.
        base_lr: the learning rate at the end of the warm-up. A ``learning_rate`` in ``optimizer_params`` replaces it.
        warmup_steps: the number of updates in the warm-up; see ``LRScheduler``.
        warmup_begin_lr: the rate at the beginning of the warm-up.
        warmup_mode: ``linear`` or ``constant``.
    """

    def __init__(
        self,
        step: int,
        factor: float = 1.0,
        stop_factor_lr: float = 1e-8,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.step = at_least("step", step, 1)
        self.factor = _factor(factor)
        self.stop_factor_lr = finite("stop_factor_lr", stop_factor_lr)

    def after_warmup(self, num_update: int) -> float:
        lr = self.base_lr
        # One by one, which gives the last bits of MXNet; a power rounds differently.
        for _ in range(max(0, num_update - 1) // self.step):
            lr, before = max(lr * self.factor, self.stop_factor_lr), lr
            if lr == before:
                break
        return lr


class MultiFactorScheduler(LRScheduler):
    """Multiplies the rate by ``factor`` after each update listed in ``step``.

    Args:
        step: the numbers of the updates after which the rate changes, in increasing order.
        factor: what the rate is multiplied by.
        base_lr: the learning rate at the end of the warm-up. A ``learning_rate`` in ``optimizer_params`` replaces it.
        warmup_steps: the number of updates in the warm-up; see ``LRScheduler``.
        warmup_begin_lr: the rate at the beginning of the warm-up.
        warmup_mode: ``linear`` or ``constant``.
    """

    def __init__(
        self,
        step: Sequence[int],
        factor: float = 1.0,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.step = [at_least("step", number, 1) for number in step]
        if not self.step or self.step != sorted(set(self.step)):
            raise UsageError(f"step={list(step)} must be a list of increasing numbers")
        self.factor = _factor(factor)

    def after_warmup(self, num_update: int) -> float:
        lr = self.base_lr
        for step in self.step:
            if num_update > step:
                lr *= self.factor
        return lr


class PolyScheduler(LRScheduler):
    """Goes from the base rate to ``final_lr``, reached at ``max_update``, as a polynomial of power ``pwr``.

    Args:
        max_update: the number of the update at which ``final_lr`` is reached.
        base_lr: the learning rate at the end of the warm-up. A ``learning_rate`` in ``optimizer_params`` replaces it.
        pwr: the power of the polynomial.
        final_lr: the rate at the end.
        warmup_steps: the number of updates in the warm-up; see ``LRScheduler``.
        warmup_begin_lr: the rate at the beginning of the warm-up.
        warmup_mode: ``linear`` or ``constant``.
    """

    def __init__(
        self,
        max_update: int,
        base_lr: float = 0.01,
        pwr: float = 2,
        final_lr: float = 0.0,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.power = finite("pwr", pwr)
        self.final_lr = finite("final_lr", final_lr)
        self.max_update = _beyond(max_update, self.warmup_steps)

    def after_warmup(self, num_update: int) -> float:
        left: float = pow(1 - _part(num_update, self.warmup_steps, self.max_update), self.power)
        return self.final_lr + (self.base_lr - self.final_lr) * left


class CosineScheduler(LRScheduler):
    """Goes from the base rate to ``final_lr``, reached at ``max_update``, as half a period of a cosine.

    Args:
        max_update: the number of the update at which ``final_lr`` is reached.
        base_lr: the learning rate at the end of the warm-up. A ``learning_rate`` in ``optimizer_params`` replaces it.
        final_lr: the rate at the end.
        warmup_steps: the number of updates in the warm-up; see ``LRScheduler``.
        warmup_begin_lr: the rate at the beginning of the warm-up.
        warmup_mode: ``linear`` or ``constant``.
    """

    def __init__(
        self,
        max_update: int,
        base_lr: float = 0.01,
        final_lr: float = 0.0,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.final_lr = finite("final_lr", final_lr)
        self.max_update = _beyond(max_update, self.warmup_steps)

    def after_warmup(self, num_update: int) -> float:
        done, total = min(num_update, self.max_update) - self.warmup_steps, self.max_update - self.warmup_steps
        return self.final_lr + (self.base_lr - self.final_lr) * (1 + cos(pi * done / total)) / 2


def _part(num_update: int, first: int, last: int) -> float:
    return float(min(num_update, last) - first) / float(last - first)


def _factor(value: float) -> float:
    factor = finite("factor", value)
    if factor > 1:
        raise UsageError(f"factor={factor:g} must be at most 1, so that the rate falls")
    return factor


def _beyond(max_update: int, warmup_steps: int) -> int:
    last = at_least("max_update", max_update, 1)
    if last <= warmup_steps:
        raise UsageError(f"max_update={last} must be more than warmup_steps={warmup_steps}")
    return last
