"""Hyper-parameters as plain numbers: what counts as the same, and what has changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from workers.alike import CurrentHyperparameters, Hyperparameter, difference


def named(groups: list[dict[str, Any]]) -> tuple[Hyperparameter, ...]:
    current = CurrentHyperparameters(SimpleNamespace(param_groups=groups))  # type: ignore[arg-type]
    return current.items(current.read())


def adam(**options: Any) -> torch.optim.Adam:
    return torch.optim.Adam([nn.Parameter(torch.ones(2))], **options)


def same(one: torch.optim.Optimizer, two: torch.optim.Optimizer) -> bool:
    currents = [CurrentHyperparameters(optimizer) for optimizer in (one, two)]
    values = [current.read() for current in currents]
    first, second = (current.items(its) for current, its in zip(currents, values, strict=True))
    alike = len({current.fingerprint(its) for current, its in zip(currents, values, strict=True)}) == 1
    assert alike is (difference(first, second) is None)
    return alike


def test_numbers_are_compared_whatever_holds_them() -> None:
    assert same(adam(lr=0.5), adam(lr=torch.tensor(0.5)))
    assert same(adam(lr=1), adam(lr=1.0))
    assert same(adam(lr=np.float64(0.25), betas=[0.5, 0.75]), adam(lr=0.25, betas=(0.5, 0.75)))
    assert same(adam(lr=0.5, foreach=True), adam(lr=0.5, foreach=False)), "how it is computed does not matter"
    assert not same(adam(lr=0.5), adam(lr=0.5 + 1e-12))
    assert not same(adam(weight_decay=0.1), adam())
    assert not same(adam(amsgrad=True), adam())


def test_what_is_no_number_is_left_out() -> None:
    groups: list[dict[str, Any]] = [{"params": [], "lr": 0.5, "odd": object(), "many": torch.ones(3), "name": "a"}]
    assert [(item.name, item.group, item.value) for item in named(groups)] == [
        ("lr", 0, 0.5),
        ("name", 0, "a"),
    ]


def test_a_difference_names_its_group_if_there_are_several() -> None:
    one = named([{"lr": 0.1}])
    two = named([{"lr": 0.1}, {"lr": 0.2}])
    assert difference(one, named([{"lr": 0.3}])) == ("learning rate", 0.1, 0.3)
    assert difference(one, two) == ("learning rate of group 1", None, 0.2)
    assert difference(two, two) is None


def rate(value: Any) -> Any:
    return lambda group: group.update(lr=value)


@pytest.mark.parametrize(
    ("first", "change"),
    [
        (0.5, rate(0.25)),
        (0.5, rate(torch.tensor(0.25))),
        (torch.tensor(0.5), lambda group: group["lr"].fill_(0.25)),
        (torch.tensor(0.5), lambda group: group["lr"].data.fill_(0.25)),
        (torch.tensor(0.5), rate(torch.tensor(0.25))),
        (torch.tensor(0.5), rate(torch.tensor([0.25, 0.5]))),
        (0.5, lambda group: group["betas"].__setitem__(0, 0.7)),
        (0.5, lambda group: group.update(new=3)),
    ],
)
def test_what_has_changed_is_read_anew_and_nothing_else(first: Any, change: Any) -> None:
    optimizer = adam(lr=first)
    optimizer.param_groups[0]["betas"] = [0.5, 0.75]
    current = CurrentHyperparameters(optimizer)
    before = current.read()
    assert current.read() is before
    optimizer.param_groups[0]["eps"] = float(optimizer.param_groups[0]["eps"])
    assert current.read() is before
    change(optimizer.param_groups[0])
    after = current.read()
    assert after is not before
    assert current.items(after) == named(optimizer.param_groups)
    assert current.fingerprint(after) != current.fingerprint(before)
    assert current.read() is after
