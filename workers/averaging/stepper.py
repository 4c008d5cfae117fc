"""Steps of a worker's own optimizer, each followed by what is due after it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch

from kvstore import Mismatch
from workers.common.checks import require_optimizer
from workers.common.gather import Gather, digest
from workers.common.values import describe


class Stepper(ABC):
    """What trains by steps of an optimizer that the program has made."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        require_optimizer(optimizer)
        self._optimizer = optimizer
        self._steps = self._rounds = 0

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one step of the optimizer, and do what ``after_step`` does. Returns what the optimizer's ``step`` does.

        Args:
            closure: what the optimizer's ``step`` takes: it evaluates the model again and returns the loss.
        """
        loss = self._inner_step(closure)
        self.after_step()
        return loss

    def _inner_step(self, closure: Callable[[], float] | None) -> float | None:
        loss: float | None = self._optimizer.step() if closure is None else self._optimizer.step(closure)
        return loss

    @abstractmethod
    def after_step(self) -> None:
        """Count a step that the program has made itself, for example with a ``GradScaler``, and do what is due."""


def require_alike(
    gather: Gather, kind: str, settings: Mapping[str, int | str], values: Mapping[str, torch.Tensor]
) -> None:
    """Raise ``Mismatch`` unless all workers have the same class, settings and model. Every worker calls this."""
    model = digest(describe(values))
    numbers = [digest(value) if isinstance(value, str) else value for value in settings.values()]
    rows = gather.exchange([digest(kind), model, *numbers])
    for rank, (their_kind, their_model, *their_numbers) in rows.items():
        if their_kind != digest(kind):
            raise Mismatch(f"worker {rank} has made something else than a {kind}; all workers must make the same")
        for (name, value), number, their_number in zip(settings.items(), numbers, their_numbers, strict=False):
            if their_number != number:
                theirs = "another" if isinstance(value, str) else f"{their_number}"
                raise Mismatch(f"workers disagree on {name}: {value} on this one, {theirs} on worker {rank}")
        if their_model != model:
            raise Mismatch(
                f"worker {rank} has another model, optimizer or setting of buffers: names, shapes, dtypes and order "
                "of the averaged values must be the same on all workers"
            )
