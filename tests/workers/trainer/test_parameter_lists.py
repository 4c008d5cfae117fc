"""What a Trainer gives to its store: keys, weights and gradients in one order."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import kvstore as kv
from workers.trainer.gradient_sync import ParameterLists
from workers.trainer.parameters import Parameter


def parameters(devices: int) -> list[Parameter]:
    return [
        Parameter(key, tuple(nn.Parameter(torch.full((2,), float(device))) for device in range(devices)))
        for key in ("a", "b", "c")
    ]


def test_one_device_gives_tensors_and_several_give_lists() -> None:
    one, two = parameters(1), parameters(2)
    weights = ParameterLists(one, None).weights()
    assert all(weight is param.tensors[0] for weight, param in zip(weights, one, strict=True))
    assert ParameterLists(two, None).weights() == [list(param.tensors) for param in two]


def test_positions_that_are_left_out_are_left_out_of_all_lists() -> None:
    params = parameters(1)
    for number in (0, 2):
        params[number].tensors[0].grad = torch.full((2,), float(number))
    lists = ParameterLists(params, None)
    assert lists.keys() == ["a", "b", "c"]
    assert lists.keys([1]) == ["a", "c"]
    assert len(lists.weights([1])) == 2
    assert [grad.tolist() for grad in lists.gradients([1])] == [[0, 0], [2, 2]]
    with pytest.raises(kv.UsageError, match="parameter 'b' has no gradient"):
        lists.gradients()


def test_zero_grad_drops_gradients_or_zeroes_those_in_the_stores_memory() -> None:
    params = parameters(1)
    tensor = params[0].tensors[0]
    tensor.grad = torch.ones(2)
    ParameterLists(params, None).zero_grad()
    assert tensor.grad is None
    lists = ParameterLists(params, kv.create("local"))
    lists.zero_grad()
    assert tensor.grad is not None
    memory = tensor.grad.data_ptr()
    tensor.grad.add_(1)
    lists.zero_grad()
    assert (tensor.grad.data_ptr(), tensor.grad.tolist()) == (memory, [0, 0])
