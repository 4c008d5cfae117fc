"""The parameters of a Trainer: whatever torch gives becomes one list by key, with a tensor per device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from kvstore import UsageError
from workers.trainer.parameters import collect


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1, bias=False))


NAMES = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight"]


@pytest.mark.parametrize(
    ("give", "keys"),
    [
        (lambda model: model.named_parameters(), NAMES),
        (lambda model: list(model.named_parameters()), NAMES),
        (lambda model: dict(model.named_parameters()), NAMES),
        (lambda model: model.parameters(), [0, 1, 2, 3, 4]),
        (lambda model: tuple(model.parameters()), [0, 1, 2, 3, 4]),
        (lambda model: [(7, model[0].weight)], [7]),
        (lambda model: {"w": model[0].weight}, ["w"]),
        (lambda model: [list(model.parameters())], [0, 1, 2, 3, 4]),
    ],
)
def test_one_device(give: Any, keys: list[Any]) -> None:
    model = network()
    params = collect(give(model)).params
    assert [param.key for param in params] == keys
    assert all(len(param.tensors) == 1 for param in params)
    assert params[0].tensors[0] is model[0].weight


@pytest.mark.parametrize(
    "give",
    [
        lambda model: model.named_parameters(),
        lambda model: model.parameters(),
        lambda model: dict(model.named_parameters()),
        lambda model: list(model.parameters()),
    ],
)
def test_several_devices(give: Any) -> None:
    models = [network() for _ in range(3)]
    params = collect([give(model) for model in models]).params
    assert len(params) == 5
    for i, model in enumerate(models):
        assert params[0].tensors[i] is model[0].weight
        assert params[4].tensors[i] is model[2].weight


def test_parameters_that_are_not_trained_are_left_out() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    assert [param.key for param in collect(model.named_parameters()).params] == NAMES[1:]
    assert [param.key for param in collect(model.parameters()).params] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ([], "no parameters"),
        ({}, "no parameters"),
        ([[]], "no parameters"),
        ([torch.zeros(1)], "no parameters that require a gradient"),
        ([("w", nn.Parameter(torch.zeros(1)))] * 2, "the same name"),
        ([("w", 3)], "not tuple"),
        ({"w": 3}, "a parameter must be a tensor"),
        ([[3]], "not int"),
        ([nn.Parameter(torch.zeros(1)), 3], "not int"),
    ],
)
def test_what_is_no_list_of_parameters(params: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        collect(params)


@pytest.mark.parametrize(
    "model",
    [network(), nn.Bilinear(2, 2, 1), nn.ModuleList([network()]), [network()] * 2],
    ids=lambda model: type(model).__name__,
)
def test_a_model_in_place_of_its_parameters(model: Any) -> None:
    with pytest.raises(UsageError, match=r"not the model: pass model\.named_parameters\(\)"):
        collect(model)


def test_a_parameter_list_is_a_list() -> None:
    assert [param.key for param in collect(nn.ParameterList([torch.zeros(1), torch.zeros(2)])).params] == [0, 1]


def test_devices_with_different_parameters() -> None:
    one, two = network(), copy.deepcopy(network())
    two[0] = nn.Linear(3, 3)
    with pytest.raises(UsageError, match="different parameters"):
        collect([one.named_parameters(), two.named_parameters()])
    with pytest.raises(UsageError, match="different parameters"):
        collect([one.named_parameters(), one.parameters()])
    with pytest.raises(UsageError, match="different parameters"):
        collect([one.parameters(), list(one.parameters())[:-1]])


def test_gradients() -> None:
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    (param,) = collect([{"w": weight} for weight in weights]).params
    weights[0].grad = torch.ones(2)
    with pytest.raises(UsageError, match=r"'w' has no gradient: call backward\(\)"):
        param.gradients()
    weights[1].grad = torch.zeros(2)
    assert [grad.tolist() for grad in param.gradients()] == [[1, 1], [0, 0]]


def test_a_parameter_without_elements_takes_no_number() -> None:
    model = network()
    empty = nn.Parameter(torch.empty(0, 4))  # such as that of workers.Embedding
    listed = [empty, *model[0].parameters(), empty, *model[1].parameters()]  # type: ignore[index, operator]
    for given in (listed, [{"params": listed[:3]}, {"params": listed[4:]}]):
        assert [param.key for param in collect(given).params] == [0, 1, 2, 3]
