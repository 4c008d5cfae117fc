"""Steps of an optimizer, each followed by what is due."""

from __future__ import annotations

import pytest
import torch

from kvstore import UsageError
from workers.averaging.stepper import Stepper


class Counting(Stepper):
    """Notes the weight after each step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.seen: list[float] = []

    def after_step(self) -> None:
        (weight,) = self._optimizer.param_groups[0]["params"]
        self.seen.append(weight.item())


def test_what_is_due_comes_after_the_step_and_the_loss_is_returned() -> None:
    weight = torch.zeros(1, requires_grad=True)
    stepper = Counting(torch.optim.SGD([weight], lr=1.0))

    def closure() -> float:
        weight.grad = torch.ones(1)
        return 5.0

    assert stepper.step(closure) == 5.0
    assert stepper.step() is None
    assert stepper.seen == [-1.0, -2.0]


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(UsageError, match=r"must be an instance of torch.optim.Optimizer, not list"):
        Counting([])  # type: ignore[arg-type]
