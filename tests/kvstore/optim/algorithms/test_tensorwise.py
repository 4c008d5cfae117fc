"""What optimizers of our own share: they are torch optimizers, and refuse what torch's refuse."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from kvstore.optim.adaptive import FTML, AdaBelief, Ftrl, GroupAdaGrad
from kvstore.optim.layerwise import LAMB, LANS, LARS, SGLD
from kvstore.optim.tensorwise import DCASGD, Signum, Tensorwise

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
