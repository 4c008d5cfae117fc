"""What optimizers of our own share: they are torch optimizers, and refuse what torch's refuse."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from formulas import require_formula

from kvstore.optim.algorithms.adaptive import FTML, AdaBelief, Ftrl, GroupAdaGrad
from kvstore.optim.algorithms.layerwise import LAMB, LANS, LARS, SGLD
from kvstore.optim.algorithms.tensorwise import DCASGD, MxnetSGD, Signum, Tensorwise, eager
from kvstore.optim.optimizer import builtin

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
