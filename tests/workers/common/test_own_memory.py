"""Tensors whose elements lie in other tensors: refused before anything is sent, with what to pass in their place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import kvstore as kv
from workers import DistributedOptimizer, Trainer
from workers.common.tensors import has_parts, is_dense, take_apart


@pytest.fixture(scope="module")
def made_of_others() -> Iterator[dict[str, tuple[torch.Tensor, str]]]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    parts = [torch.ones(2, 2), torch.ones(3, 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that nested tensors may change
        nested = torch.nested.nested_tensor(parts)
    yield {
        "nested": (nested, r"a nested tensor: .* \(tensor\.unbind\(\)\)"),
        "jagged": (torch.nested.nested_tensor(parts, layout=torch.jagged), "a nested tensor: "),
        "DTensor": (
            distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)]),
            r"a DTensor: .* \(tensor\.to_local\(\)\), or all of it \(full_tensor\(\)\)",
        ),
        "subclass": (TwoTensor(torch.ones(4, 2), torch.ones(4, 2)), "a TwoTensor, which is made of other tensors"),
    }
    distributed.destroy_process_group()


def pushed(value: torch.Tensor) -> None:
    store = kv.create("local")
    store.init("w", torch.ones(4, 2))
    store.push("w", value)


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "init": lambda value: kv.create("local").init("w", value),
    "push": pushed,
    "a list of 20": lambda value: kv.create("local").init(list(range(20)), [torch.ones(2)] * 19 + [value]),
    "Trainer": lambda value: Trainer({"a": nn.Parameter(torch.ones(1)), "w": nn.Parameter(value)}, kvstore="local"),
    "DistributedOptimizer": lambda value: DistributedOptimizer(
        torch.optim.SGD([nn.Parameter(value)], 0.1), kvstore="local"
    ),
    "parts": take_apart,
}


@pytest.mark.parametrize("kind", ["nested", "jagged", "DTensor", "subclass"])
@pytest.mark.parametrize("call", CALLS)
def test_a_tensor_that_is_made_of_others_is_refused(
    made_of_others: dict[str, tuple[torch.Tensor, str]], kind: str, call: str
) -> None:
    value, said = made_of_others[kind]
    with pytest.raises(kv.UsageError, match=said):
        CALLS[call](value)
    assert not is_dense(value)
    assert not has_parts(value)
