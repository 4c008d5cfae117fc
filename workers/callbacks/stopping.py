"""Early stopping: no more epochs when a metric has not got better for some."""

from __future__ import annotations

import math
from typing import Any, Protocol

from kvstore import UnknownName, UsageError
from workers.callbacks.param import BatchEndParam, log
from workers.common.checks import at_least

MODES = ("auto", "max", "min")


class Stoppable(Protocol):
    """What is needed of a run of ``fit``."""

    @property
    def evaluates(self) -> bool:
        """Whether there is evaluation data."""

    def stop(self) -> None:
        """End training with this epoch."""


class EarlyStopping:
    """Ends training when a metric of the evaluation has not got better for ``patience`` epochs.

    An ``eval_end_callback``. The metric is that of all workers, so all decide alike; and if any worker stops, all do.

    Args:
        monitor: the metric's name, as it is printed; None for the first there is.
        patience: how many epochs without a better value, from 1 on.
        min_delta: by how much a value must be better to count.
        mode: ``max`` if more is better, ``min`` if less is; ``auto`` takes ``max`` for accuracies, ``min`` for others.

    Attributes:
        best: the best value so far, and
        best_epoch: its epoch, from 0; None before the first.
    """

    def __init__(
        self, monitor: str | None = None, patience: int = 5, min_delta: float = 0.0, mode: str = "auto"
    ) -> None:
        if mode not in MODES:
            raise UnknownName(f"mode={mode!r} must be one of {', '.join(MODES)}")
        if not 0 <= min_delta < math.inf:
            raise UsageError(f"min_delta={min_delta!r} must be a number of at least 0")
        self.monitor, self.patience = monitor, at_least("patience", patience, 1)
        self.min_delta, self.mode = float(min_delta), mode
        self.best: float | None = None
        self.best_epoch: int | None = None
        self._waited = 0
        self._run: Stoppable | None = None

    def begin(self, run: Stoppable) -> None:
        """Be told what to stop.

        Raises:
            UsageError: it evaluates nothing.
        """
        if not run.evaluates:
            raise UsageError("EarlyStopping looks at the evaluation: give eval_data")
        self._run = run

    def __call__(self, param: BatchEndParam) -> None:
        """Look at the end of an evaluation.

        Raises:
            UnknownName: it has no metric of the name ``monitor``.
        """
        name, value = param.value(self.monitor)
        if self._better(name, value):
            self.best, self.best_epoch, self._waited = value, param.epoch, 0
            return
        self._waited += 1
        if self._waited >= self.patience and self._run is not None:
            log.info(
                "Epoch[%d] Early stopping: %s has not got better than %f for %d epochs",
                *(param.epoch, name, math.nan if self.best is None else self.best, self._waited),
            )
            self._run.stop()

    def state_dict(self) -> dict[str, Any]:
        """Return what it remembers: numbers, fit for JSON."""
        return {"best": self.best, "best_epoch": self.best_epoch, "waited": self._waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what ``state_dict`` returned."""
        best, epoch, waited = state["best"], state["best_epoch"], int(state["waited"])
        self.best = None if best is None else float(best)
        self.best_epoch = None if epoch is None else int(epoch)
        self._waited = waited

    def _better(self, name: str, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        upwards = "accuracy" in name if self.mode == "auto" else self.mode == "max"
        return value > self.best + self.min_delta if upwards else value < self.best - self.min_delta
