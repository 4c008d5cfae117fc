"""LAMB, LANS and LARS beside their formulas; ``test_against_mxnet`` has MXNet's own results of two of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from formulas import require_formula

from kvstore.optim.algorithms.layerwise import LAMB, LANS, LARS, SGLD

norm = np.linalg.norm


def averages(grad: np.ndarray, state: dict[str, Any], step: int) -> tuple[np.ndarray, np.ndarray]:
    """Adam's, corrected, with beta1 = 0.8 and beta2 = 0.9; the second as the divisor that it is for."""
    state["m"] = 0.8 * state.get("m", 0) + 0.2 * grad
    state["v"] = 0.9 * state.get("v", 0) + 0.1 * grad**2
    return state["m"] / (1 - 0.8**step), np.sqrt(state["v"] / (1 - 0.9**step)) + 1e-4


OPTIONS: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-4, "weight_decay": 0.1}


@pytest.mark.parametrize("bounds", [(0.0, np.inf), (1.5, 2.0)])
def test_lamb(bounds: tuple[float, float]) -> None:
    def formula(weight: np.ndarray, grad: np.ndarray, state: dict[str, Any], step: int) -> np.ndarray:
        mean, divisor = averages(grad, state, step)
        update = mean / divisor + 0.1 * weight
        return weight - 0.05 * np.clip(norm(weight), *bounds) / norm(update) * update

    limits = {"lower_bound": bounds[0], "upper_bound": bounds[1]} if bounds[0] else {}
    require_formula(lambda params: LAMB(params, **OPTIONS, **limits), formula)


def test_lans() -> None:
    def formula(weight: np.ndarray, grad: np.ndarray, state: dict[str, Any], step: int) -> np.ndarray:
        grad = grad / norm(grad)
        mean, divisor = averages(grad, state, step)
        past, present = mean / divisor + 0.1 * weight, grad / divisor + 0.1 * weight
        length = norm(weight)
        return weight - 0.05 * (0.8 * length / norm(past) * past + 0.2 * length / norm(present) * present)

    require_formula(lambda params: LANS(params, **OPTIONS), formula)


@pytest.mark.parametrize("corrected", [True, False])
def test_lars_leaves_arrays_of_one_dimension_alone(corrected: bool) -> None:
    def formula(weight: np.ndarray, grad: np.ndarray, state: dict[str, Any], step: int) -> np.ndarray:
        slope, length = norm(grad), norm(weight)
        rate = 0.5 * (0.1 * length / (slope + 0.2 * length + 1e-3) if weight.ndim > 1 else 1)
        state["m"] = 0.9 * state.get("m", 0) + rate * (grad + 0.2 * weight)
        return weight - state["m"]

    options = {"lr": 0.5, "momentum": 0.9, "eta": 0.1, "eps": 1e-3, "weight_decay": 0.2}
    require_formula(lambda params: LARS(params, momentum_correction=corrected, **options), formula)


def test_lars_with_a_corrected_momentum_uses_the_current_rate_for_all_of_it() -> None:
    weight = torch.zeros(1)  # of one dimension
    optimizer = LARS([weight], momentum=0.5)
    for rate, expected in ((1.0, -2.0), (0.5, -3.5)):
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = torch.full((1,), 2.0)
        optimizer.step()
        assert weight.item() == expected


@pytest.mark.parametrize("cls", [LAMB, LANS, LARS])
def test_zeros_have_no_ratio(cls: Any) -> None:
    weight = torch.zeros(2, 2)
    optimizer = cls([weight], lr=0.1)
    weight.grad = torch.zeros(2, 2)
    optimizer.step()
    assert torch.equal(weight, torch.zeros(2, 2))
    weight.grad = torch.ones(2, 2)
    optimizer.step()
    assert weight.isfinite().all()
    assert (weight < 0).all()


def stepped(generator: torch.Generator | None, rate: float = 0.25) -> torch.Tensor:
    weight = torch.full((100_000,), 2.0)
    weight.grad = torch.ones(100_000)
    SGLD([weight], lr=rate, weight_decay=0.5, generator=generator).step()
    return weight


def test_the_noise_has_the_variance_of_the_rate() -> None:
    noise = stepped(torch.Generator().manual_seed(0)) - (2.0 - 0.25 / 2 * (1 + 0.5 * 2.0))
    assert noise.mean().item() == pytest.approx(0, abs=5 * 0.5 / 100_000**0.5)
    assert noise.std().item() == pytest.approx(0.5, rel=0.01)


def test_a_rate_of_zero_changes_nothing() -> None:
    assert torch.equal(stepped(None, rate=0.0), torch.full((100_000,), 2.0))


def test_two_of_them_have_noise_of_their_own() -> None:
    assert not torch.equal(stepped(None), stepped(None))
