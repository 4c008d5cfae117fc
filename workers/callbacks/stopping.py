"""Early stopping: training ends when a metric has not improved for some epochs."""

from __future__ import annotations

import math
from typing import Any

from kvstore import UnknownName, UsageError
from kvstore.optim.hyperparameters import finite
from workers.callbacks.param import MODES, BatchEndParam, Run, improves
from workers.common.checks import at_least
from workers.common.run_log import log_line
from workers.reducer import Reducer


class EarlyStopping:
    """Ends training when a metric of the evaluation has not improved for ``patience`` epochs.

    An ``eval_end_callback``. The metric covers all workers, so all decide alike; if any worker stops, all stop. In a
    loop of your own, call ``update``:

        stopping, reducer = callbacks.EarlyStopping(patience=3, mode="min"), workers.Reducer()
        for epoch in range(epochs):
            ...
            if stopping.update(loss, reducer):
                break

    Args:
        monitor: the metric's name as it is printed; None for the first metric.
        patience: the number of epochs without improvement, at least 1.
        min_delta: the least difference that counts as an improvement.
        mode: ``max`` if larger is better, ``min`` if smaller is. ``auto``: ``max`` for accuracies and AUC, ``min``
            otherwise.

    Attributes:
        best: the best value so far; None before the first.
        best_epoch: the epoch of the best value, from 0; None before the first.
    """

    def __init__(
        self, monitor: str | None = None, patience: int = 5, min_delta: float = 0.0, mode: str = "auto"
    ) -> None:
        if mode not in MODES:
            raise UnknownName(f"mode={mode!r} must be one of {', '.join(MODES)}")
        min_delta = finite("min_delta", min_delta)
        if min_delta < 0:
            raise UsageError(f"min_delta={min_delta!r} must be a number of at least 0")
        self.monitor, self.patience = monitor, at_least("patience", patience, 1)
        self.min_delta, self.mode = float(min_delta), mode
        self.best: float | None = None
        self.best_epoch: int | None = None
        self._waited = 0
        self._run: Run | None = None

    def begin(self, run: Run) -> None:
        """Remember ``run``, which is to be stopped.

        Raises:
            UsageError: the run has no evaluation data.
        """
        if not run.evaluates:
            raise UsageError("EarlyStopping watches the evaluation: pass eval_data")
        self._run = run

    def __call__(self, param: BatchEndParam) -> None:
        name, value = param.value(self.monitor)
        if self._is_over(name, value, param.epoch) and self._run is not None:
            log_line(
                param.rank,
                "Epoch[%d] Early stopping: %s has not improved on %f for %d epochs",
                *(param.epoch, name, math.nan if self.best is None else self.best, self._waited),
            )
            self._run.stop()

    def update(self, value: float, reducer: Reducer | None = None) -> bool:
        """Note an epoch's ``value`` in a loop of your own; return whether training should end.

        Args:
            value: of the metric, of which ``monitor`` is the name that ``mode="auto"`` goes by.
            reducer: with one, the mean of all workers' values counts, so all end alike; every worker calls this. None
                if the workers have the same value anyway, as that of a metric after ``reduce``.
        """
        if reducer is not None:
            values = [row["value"] for row in reducer.gather({"value": float(value)}).values()]
            value = sum(values) / len(values)
        epoch = self._waited if self.best_epoch is None else self.best_epoch + self._waited + 1
        return self._is_over(self.monitor or "", float(value), epoch)

    def _is_over(self, name: str, value: float, epoch: int) -> bool:
        if improves(name, value, self.best, self.mode, self.min_delta):
            self.best, self.best_epoch, self._waited = float(value), epoch, 0
        else:
            self._waited += 1
        return self._waited >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, its epoch and the count of epochs since, as JSON values."""
        return {"best": self.best, "best_epoch": self.best_epoch, "waited": self._waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``, which ``state_dict`` returned."""
        best, epoch, waited = state["best"], state["best_epoch"], int(state["waited"])
        self.best = None if best is None else float(best)
        self.best_epoch = None if epoch is None else int(epoch)
        self._waited = waited
