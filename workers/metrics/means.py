"""Means: of losses, and of what a function returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from workers.common.tensors import to_tensor
from workers.metrics.metric import EvalMetric


class Loss(EvalMetric):
    """The mean of the losses; in ``fit``, of the training loss.

    Args:
        name: the name that is printed.
    """

    output = "loss"

    def __init__(self, name: str = "loss") -> None:
        super().__init__(name)

    @torch.no_grad()
    def update(self, labels: Any, preds: Any) -> None:
        """See ``EvalMetric``; the labels are ignored."""
        for pred in preds if isinstance(preds, list | tuple) else [preds]:
            losses = to_tensor(pred)
            self.sum_metric = self.sum_metric + losses.double().sum()
            self.num_inst += losses.numel()


class CustomMetric(EvalMetric):
    """The mean of a function's values over batches, or the quotient of its sums and counts.

    Args:
        feval: a function from a batch's labels and predictions to a number, or to a sum and a count.
        name: the name that is printed; None for ``custom(...)`` with the name of the function.
    """

    def __init__(self, feval: Callable[[torch.Tensor, torch.Tensor], Any], name: str | None = None) -> None:
        self._feval = feval
        super().__init__(name or f"custom({getattr(feval, '__name__', type(feval).__name__)})")

    def measure(self, label: torch.Tensor, pred: torch.Tensor) -> tuple[torch.Tensor | float, int]:
        """See ``EvalMetric``."""
        value = self._feval(label, pred)
        return value if isinstance(value, tuple) else (value, 1)
