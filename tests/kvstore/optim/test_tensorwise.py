"""Optimizers of our own: the formulas of their sources, and what they have in common with torch's."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.optim.algorithms.adaptive import FTML, AdaBelief, Ftrl, GroupAdaGrad, RowWiseAdagrad, RowWiseAdam
from kvstore.optim.algorithms.layerwise import LAMB, LANS, LARS, SGLD
from kvstore.optim.algorithms.tensorwise import DCASGD, MxnetSGD, Signum, Tensorwise, eager
from kvstore.optim.optimizer import builtin

Formula = Callable[[np.ndarray, np.ndarray, dict[str, Any], int], np.ndarray]  # weight, gradient, state, step from 1


def require_formula(
    make: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    formula: Formula,
    shapes: Sequence[tuple[int, ...]] = ((3, 4), (5,)),
    steps: int = 5,
) -> None:
    """Assert that the optimizer gives what ``formula`` does, for several arrays and steps."""
    random = np.random.RandomState(0)
    arrays = [random.randn(*shape) for shape in shapes]
    states: list[dict[str, Any]] = [{} for _ in arrays]
    params = [torch.from_numpy(array.copy()) for array in arrays]
    optimizer = make(params)
    for step in range(1, steps + 1):
        grads = [random.randn(*shape) for shape in shapes]
        for param, grad in zip(params, grads, strict=True):
            param.grad = torch.from_numpy(grad.copy())
        optimizer.step()
        arrays = [formula(*each, step) for each in zip(arrays, grads, states, strict=True)]
        for param, array in zip(params, arrays, strict=True):
            np.testing.assert_allclose(param.numpy(), array, rtol=1e-9, atol=1e-12)


EVERY = (AdaBelief, DCASGD, FTML, Ftrl, GroupAdaGrad, LAMB, LANS, LARS, SGLD, Signum)


@pytest.fixture(params=EVERY, ids=lambda cls: cls.__name__)
def cls(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_a_closure_is_called_with_gradients_on(cls: Any) -> None:
    weight = torch.ones(2, 3, requires_grad=True)
    optimizer = cls([weight])

    def closure() -> torch.Tensor:
        loss = (weight * torch.arange(6.0).view(2, 3)).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 15
    assert not torch.equal(weight.detach(), torch.ones(2, 3))


def test_weights_without_a_gradient_stay(cls: Any) -> None:
    still, moved = torch.ones(2, 3), torch.ones(2, 3)
    moved.grad = torch.ones(2, 3)
    cls([still, moved]).step()
    assert torch.equal(still, torch.ones(2, 3))
    assert not torch.equal(moved, still)


def test_a_state_dict_goes_on_where_it_was(cls: Any) -> None:
    def stepped(weight: torch.Tensor, optimizer: Any, seed: int) -> torch.Tensor:
        weight.grad = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
        optimizer.step()
        return weight

    noise = {"generator": torch.Generator().manual_seed(7)} if cls is SGLD else {}
    weight = torch.ones(2, 3)
    optimizer = cls([weight], **noise)
    for seed in range(3):
        stepped(weight, optimizer, seed)
    other = weight.clone()
    again = cls([other], **({"generator": noise["generator"].clone_state()} if noise else {}))
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(stepped(other, again, 3), stepped(weight, optimizer, 3))


def test_numbers_that_make_no_sense_are_refused(cls: Any) -> None:
    weight = [torch.ones(2, 3)]
    numbers = {name: value for name, value in cls(weight).param_groups[0].items() if type(value) is float}
    assert "lr" in numbers
    for name in numbers:
        for bad in (-0.1, float("nan")):
            with pytest.raises(ValueError, match="Invalid"):
                cls(weight, **{name: bad})


@pytest.mark.parametrize("cls", [AdaBelief, FTML, LAMB, LANS])
def test_rates_of_decay_are_below_one(cls: Any) -> None:
    for bad in ((1.0, 0.5), (0.5, -0.1), (0.5, float("nan"))):
        with pytest.raises(ValueError, match="Invalid beta"):
            cls([torch.ones(2, 3)], betas=bad)


@pytest.mark.parametrize("cls", [LAMB, LANS])
def test_bounds_are_not_negative(cls: Any) -> None:
    with pytest.raises(ValueError, match="Invalid lower_bound: -1"):
        cls([torch.ones(2, 3)], lower_bound=-1.0)


def test_optimizers_that_look_at_norms_say_so() -> None:
    assert {cls for cls in EVERY if not cls.elementwise} == {GroupAdaGrad, LAMB, LANS, LARS}
    assert issubclass(LAMB, Tensorwise)


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


TORCHS = sorted(name for name, each in builtin().items() if each.cls.__module__.startswith("torch.optim"))
ALL = """
import sys, torch
from kvstore.optim.optimizer import builtin

weight = torch.zeros(4, 4)
for each in builtin().values():
    for options in ({}, {"momentum": 0.9, **{name: words[-1] for name, words in each.words.items()}}):
        if options.keys() <= each.hyperparameters.keys():
            weight.grad = torch.ones(4, 4)
            each.build([weight], options).step()
sys.exit("torch._dynamo" in sys.modules)
"""


@pytest.mark.long
def test_no_optimizer_imports_the_compiler() -> None:
    assert subprocess.run([sys.executable, "-c", ALL]).returncode == 0


@pytest.mark.parametrize("name", TORCHS)
def test_steps_are_torchs_own_to_the_bit(name: str) -> None:
    cls = builtin()[name].cls
    torch.manual_seed(0)
    first = torch.randn(5, 3)
    weights = [first.clone().requires_grad_() for _ in range(2)]
    one, two = cls([weights[0]], lr=0.1), eager(cls)([weights[1]], lr=0.1)
    assert isinstance(two, cls)
    assert repr(one) == repr(two)
    for _ in range(3):
        gradient = torch.randn(5, 3)
        for weight, optimizer in zip(weights, (one, two), strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
    assert weights[0].equal(weights[1])
    assert not weights[1].equal(first)
    states = [optimizer.state[weight] for weight, optimizer in zip(weights, (one, two), strict=True)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.as_tensor(states[0][key]).equal(torch.as_tensor(states[1][key])) for key in states[0])


def test_a_class_is_made_once() -> None:
    assert eager(torch.optim.SGD) is eager(torch.optim.SGD)


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
