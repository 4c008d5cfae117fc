"""Optimizers with rates of elements or rows beside their formulas; ``test_against_mxnet`` has MXNet's own results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from formulas import require_formula

from kvstore.optim.algorithms.adaptive import FTML, AdaBelief, Ftrl, GroupAdaGrad, RowWiseAdagrad, RowWiseAdam


@pytest.mark.parametrize("corrected", [True, False])
def test_adabelief_divides_by_the_deviation_of_gradients(corrected: bool) -> None:
    def formula(weight: np.ndarray, grad: np.ndarray, state: dict[str, Any], step: int) -> np.ndarray:
        grad = grad + 0.1 * weight
        state["m"] = 0.8 * state.get("m", 0) + 0.2 * grad
        state["s"] = 0.9 * state.get("s", 0) + 0.1 * (grad - state["m"]) ** 2 + 1e-4
        factor = np.sqrt(1 - 0.9**step) / (1 - 0.8**step) if corrected else 1
        return weight - 0.01 * factor * state["m"] / (np.sqrt(state["s"]) + 1e-4)

    options = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-4, "weight_decay": 0.1, "correct_bias": corrected}
    require_formula(lambda params: AdaBelief(params, **options), formula)


def test_ftml_follows_the_moving_leader() -> None:
    def formula(weight: np.ndarray, grad: np.ndarray, state: dict[str, Any], step: int) -> np.ndarray:
        grad = grad + 0.1 * weight
        state["v"] = 0.9 * state.get("v", 0) + 0.1 * grad**2
        d = (1 - 0.6**step) / 0.02 * (np.sqrt(state["v"] / (1 - 0.9**step)) + 1e-6)
        state["z"] = 0.6 * state.get("z", 0) + 0.4 * grad - (d - 0.6 * state.get("d", 0)) * weight
        state["d"] = d
        return -state["z"] / d

    require_formula(lambda params: FTML(params, lr=0.02, betas=(0.6, 0.9), eps=1e-6, weight_decay=0.1), formula)


def test_ftrl_makes_small_weights_zero() -> None:
    def formula(weight: np.ndarray, grad: np.ndarray, state: dict[str, Any], step: int) -> np.ndarray:
        n = state.get("n", 0)
        state["n"] = n + grad**2
        state["z"] = state.get("z", 0) + grad - (np.sqrt(state["n"]) - np.sqrt(n)) * weight / 0.5
        z, divisor = state["z"], (0.7 + np.sqrt(state["n"])) / 0.5 + 0.1
        return np.where(np.abs(z) <= 0.8, 0, (np.sign(z) * 0.8 - z) / divisor)

    require_formula(lambda params: Ftrl(params, lr=0.5, lamda1=0.8, beta=0.7, weight_decay=0.1), formula)


@pytest.mark.parametrize("cls", [FTML, Ftrl])
def test_a_rate_of_zero_leaves_all_as_it_is(cls: Any) -> None:
    weight = torch.linspace(-1, 1, 4)
    optimizer = cls([weight])
    for rate in (0.1, 0.0, 0.0):
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = torch.ones(4)
        optimizer.step()
        if rate:
            before = weight.clone()
            kept = {name: value.clone() for name, value in optimizer.state[weight].items()}
    assert torch.equal(weight, before)
    assert all(torch.equal(value, kept[name]) for name, value in optimizer.state[weight].items())


def test_groupadagrad_has_a_rate_for_each_row() -> None:
    def formula(weight: np.ndarray, grad: np.ndarray, state: dict[str, Any], step: int) -> np.ndarray:
        state["h"] = state.get("h", 0) + (grad**2).mean(axis=1, keepdims=True)
        return weight - 0.1 * grad / np.sqrt(state["h"] + 1e-3)

    require_formula(lambda params: GroupAdaGrad(params, lr=0.1, eps=1e-3), formula, shapes=((3, 4), (2, 1)))


def test_row_wise_adagrad_has_a_number_for_each_row() -> None:
    def formula(weight: np.ndarray, grad: np.ndarray, state: dict[str, Any], step: int) -> np.ndarray:
        grad = grad + 0.1 * weight
        state["s"] = state.get("s", 0.5) + np.mean(grad**2, axis=1, keepdims=True)
        return weight - 0.1 * grad / (np.sqrt(state["s"]) + 1e-3)

    options = {"lr": 0.1, "eps": 1e-3, "initial_accumulator_value": 0.5, "weight_decay": 0.1}
    require_formula(lambda params: RowWiseAdagrad(params, **options), formula, shapes=((3, 4), (2, 1)))


def test_row_wise_adam_has_a_second_moment_for_each_row() -> None:
    def formula(weight: np.ndarray, grad: np.ndarray, state: dict[str, Any], step: int) -> np.ndarray:
        state["m"] = 0.8 * state.get("m", 0) + 0.2 * grad
        state["v"] = 0.9 * state.get("v", 0) + 0.1 * np.mean(grad**2, axis=1, keepdims=True)
        mean, square = state["m"] / (1 - 0.8**step), state["v"] / (1 - 0.9**step)
        return weight - 0.01 * (mean / (np.sqrt(square) + 1e-4) + 0.1 * weight)

    options = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-4, "weight_decay": 0.1}
    require_formula(lambda params: RowWiseAdam(params, **options), formula, shapes=((3, 4), (2, 1)))
