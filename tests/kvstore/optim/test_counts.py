"""A count of updates in the param group becomes one of each parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counting import Counting

from kvstore.optim.optimizer_class import COUNT, with_own_counts


def stepped(optimizer: torch.optim.Optimizer, *params: torch.Tensor, grad: float = 1.0) -> list[float]:
    for param in params:
        param.grad = torch.full_like(param, grad)
    optimizer.param_groups[0]["params"] = list(params)
    optimizer.step()
    return [param.item() for param in params]


def test_each_parameter_has_its_own_count() -> None:
    one, other = torch.zeros(1), torch.zeros(1)
    cls: Any = with_own_counts(Counting)
    optimizer = cls([one])
    assert stepped(optimizer, one) == [-1]
    assert stepped(optimizer, one, other) == [-3, -1]
    assert stepped(optimizer, other, one) == [-3, -6]
    assert {param: state[COUNT].item() for param, state in optimizer.state.items()} == {one: 3, other: 2}
    assert optimizer.param_groups[0]["params"] == [other, one]
    assert "step" not in optimizer.param_groups[0]


def test_a_count_goes_on_where_it_was() -> None:
    weight = torch.zeros(1)
    cls: Any = with_own_counts(Counting)
    optimizer = cls([weight])
    optimizer.state[weight] = {"sum": torch.ones(1), COUNT: torch.tensor(4.0)}
    assert stepped(optimizer, weight) == [-5]
    assert optimizer.state[weight]["sum"].item() == 2


def test_a_step_that_fails_counts_nothing_and_loses_nothing() -> None:
    one, other = torch.zeros(1), torch.zeros(1)
    cls: Any = with_own_counts(Counting)
    optimizer = cls([one])
    stepped(optimizer, one)
    with pytest.raises(FloatingPointError):
        stepped(optimizer, other, one, grad=float("nan"))
    assert optimizer.state[one][COUNT].item() == 1
    assert COUNT not in optimizer.state.get(other, {})
    assert optimizer.param_groups[0]["params"] == [other, one]
