"""SGD with MXNet's momentum, Signum and DCASGD; ``test_against_mxnet`` has MXNet's own results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from formulas import require_formula

from kvstore.optim.tensorwise import DCASGD, MxnetSGD, Signum


def ends(rates: list[float], **options: Any) -> float:
    weight = torch.zeros(1)
    optimizer = MxnetSGD([weight], momentum=0.5, **options)
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = torch.full((1,), 2.0)
        optimizer.step()
    return weight.item()


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_steps_keep_the_rate_that_they_were_made_with(how: dict[str, Any]) -> None:
    assert ends([1, 0.5], **how) == -4.0
    assert ends([1, 0.5], nesterov=True, **how) == -5.0
    assert ends([1, 0, 0], **how) == -3.5


@pytest.mark.parametrize("nesterov", [False, True])
def test_at_a_constant_rate_it_is_torchs(nesterov: bool) -> None:
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": nesterov}
    results = []
    for cls in (MxnetSGD, torch.optim.SGD):
        weight = torch.linspace(-1, 1, 5)
        optimizer = cls([weight], **options)
        for step in range(4):
            weight.grad = torch.linspace(1, step, 5)
            optimizer.step()
        results.append(weight)
    torch.testing.assert_close(*results)


def test_numbers_are_back_after_a_step_and_after_one_that_fails() -> None:
    weight = torch.ones(2)
    weight.grad = torch.ones(2)
    optimizer = MxnetSGD([weight], lr=0.5, momentum=0.9, weight_decay=0.25)
    optimizer.step()
    optimizer.state[weight]["momentum_buffer"] = torch.ones(3)
    with pytest.raises(RuntimeError):
        optimizer.step()
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["momentum_style"]) == (0.5, 0.25, "mxnet")


def test_signum_is_the_sign_of_an_average() -> None:
    def formula(weight: np.ndarray, grad: np.ndarray, state: dict[str, Any], step: int) -> np.ndarray:
        state["m"] = 0.9 * state.get("m", 0) + 0.1 * (grad + 0.1 * weight)
        return (1 - 0.01 * 0.5) * weight - 0.01 * np.sign(state["m"])

    require_formula(lambda params: Signum(params, lr=0.01, weight_decay=0.1, wd_lh=0.5), formula)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_dcasgd_compensates_for_the_last_step(momentum: float) -> None:
    def formula(weight: np.ndarray, grad: np.ndarray, state: dict[str, Any], step: int) -> np.ndarray:
        drift = weight - state.get("previous", weight)
        state["m"] = momentum * state.get("m", 0) - 0.1 * (grad + 0.01 * weight + 0.5 * grad * grad * drift)
        state["previous"] = weight
        return weight + state["m"]

    require_formula(lambda params: DCASGD(params, lr=0.1, momentum=momentum, lamda=0.5, weight_decay=0.01), formula)
