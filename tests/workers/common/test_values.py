"""What is averaged: an optimizer's parameters and a model's buffers, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from kvstore import UsageError
from workers.common.values import buffers_around, buffers_of, module_of, parameters_of


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 5)
        self.out.weight = self.embedding.weight


def test_parameters_of_a_module() -> None:
    model = Tied()
    model.norm.weight.requires_grad_(False)
    found = parameters_of(model, torch.optim.SGD(model.parameters()))
    assert list(found) == ["embedding.weight", "norm.weight", "norm.bias", "out.bias"]
    assert found["embedding.weight"] is model.out.weight
    some = parameters_of(model, torch.optim.SGD([model.out.bias, model.norm.bias]))
    assert list(some) == ["norm.bias", "out.bias"], "in the order of the model"


@pytest.mark.parametrize(
    "give",
    [
        lambda model: model.named_parameters(),
        lambda model: list(model.named_parameters()),
        lambda model: dict(model.named_parameters(remove_duplicate=False)),
    ],
)
def test_parameters_by_name(give: Any) -> None:
    model = Tied()
    found = parameters_of(give(model), torch.optim.SGD(model.parameters()))
    assert list(found) == ["embedding.weight", "norm.weight", "norm.bias", "out.bias"]


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ([], r"of shape \[2\] that is not among the model's"),
        (nn.Linear(2, 2), "not among the model's: pass the model"),
        (3, "pass a module, or its named_parameters"),
        ([torch.zeros(2)], "not Tensor"),
        ([("w", 3)], "not tuple"),
        ([("w", torch.zeros(2))] * 2, "the same name"),
    ],
)
def test_what_is_no_model(model: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        parameters_of(model, torch.optim.SGD([nn.Parameter(torch.zeros(2))]))


def test_a_model_without_elements() -> None:
    empty = nn.Parameter(torch.zeros(0, 3))
    with pytest.raises(UsageError, match="has no parameters to average"):
        parameters_of({"w": empty}, torch.optim.SGD([empty]))


def test_buffers_are_floating_point_and_found_when_assigned_anew() -> None:
    model = Tied()
    model.register_buffer("scale", torch.ones(2))
    found = buffers_of(model)
    assert list(found) == ["scale", "norm.running_mean", "norm.running_var"]
    model.scale = torch.full((2,), 3.0)
    assert found["scale"].tensor.tolist() == [3, 3]
    assert buffers_of(model.named_parameters()) == {}


def test_an_optimizers_parameters_lead_to_the_buffers_of_their_model() -> None:
    model, other = nn.ModuleDict({"inner": Tied(), "free": nn.BatchNorm1d(2, affine=False)}), Tied()
    found = buffers_around([model["inner"].out.bias])
    assert {id(buffer) for buffer in found.values()} == {id(buffer) for buffer in model.buffers()}
    assert "ModuleDict.inner.norm.running_mean" in found
    assert not {id(buffer) for buffer in other.buffers()} & {id(buffer) for buffer in found.values()}
    assert buffers_around([torch.zeros(2)]) == {}


@pytest.mark.parametrize("first", [0, 1])
def test_two_models_of_one_class_have_names_by_the_order_of_the_optimizer(first: int) -> None:
    models = [Tied(), Tied()]
    ordered = [models[first], models[1 - first]]
    found = buffers_around(param for model in ordered for param in model.parameters())
    for prefix, model in zip(("Tied", "Tied 2"), ordered, strict=True):
        assert found[f"{prefix}.norm.running_mean"] is model.norm.running_mean
    assert len(found) == 6


def test_an_iterator_of_a_module_knows_it_until_it_is_read() -> None:
    model = Tied()
    assert module_of(model) is module_of(model.named_parameters()) is module_of(model.parameters()) is model
    assert module_of(dict(model.named_parameters())) is module_of(tensor for tensor in [model.out.bias]) is None
    read = model.parameters()
    next(read)
    assert module_of(list(read)) is None
