"""Steps of a worker's own optimizer, each followed by what is due after it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from kvstore import UsageError


class Stepper(ABC):
    """What trains by steps of an optimizer that the program has made.

    Args:
        optimizer: this worker's.

    Raises:
        UsageError: it is no optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"optimizer must be an instance of torch.optim.Optimizer, not {type(optimizer).__name__}")
        self._optimizer = optimizer
        self._steps = self._rounds = 0

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one step of the optimizer, and do what ``after_step`` does. Returns what the optimizer's ``step`` does.

        Args:
            closure: what the optimizer's ``step`` takes: it evaluates the model again and returns the loss.
        """
        loss: float | None = self._optimizer.step() if closure is None else self._optimizer.step(closure)
        self.after_step()
        return loss

    @abstractmethod
    def after_step(self) -> None:
        """Count a step that the program has made itself, for example with a ``GradScaler``, and do what is due."""
