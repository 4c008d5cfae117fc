"""Compression between the devices of one process: each value has a residual of its own, as in MXNet."""

from __future__ import annotations

import pytest
import torch

import kvstore as kv

# What MXNet 1.9.1's device store has after each of three pushes of these values, and of the first one alone.
VALUES = torch.tensor([0.3, 0.6, -0.7, 0.1]), torch.tensor([0.3, -0.2, -0.7, 2.0])
SUMS = [[0.0, 0.5, -1.0, 0.5], [1.0, 0.5, -1.0, 0.5], [0.0, 0.0, -1.0, 0.5]]
ALONE = [0.5, 0.5, -0.5, 0.0]


def stored(store: kv.KVStore, like: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(like)
    store.pull("w", out)
    return out


@pytest.mark.parametrize("name", ["local", "device"])
def test_sums_are_those_of_mxnet(name: str) -> None:
    store = kv.create(name)
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    store.init("w", torch.zeros(4))
    for expected in SUMS:
        store.push("w", list(VALUES))
        assert stored(store, VALUES[0]).tolist() == expected
    store.push("w", VALUES[0])
    assert stored(store, VALUES[0]).tolist() == ALONE
    store.set_gradient_compression(None)
    store.push("w", list(VALUES))
    assert torch.equal(stored(store, VALUES[0]), VALUES[0] + VALUES[1])


@pytest.mark.parametrize("kind", [{"type": "1bit", "threshold": 0.5}, {"type": "int8"}, {"type": "topk", "k": 1}])
def test_residuals_go_with_the_next_pushes(kind: dict[str, object]) -> None:
    store = kv.create("device")
    store.set_gradient_compression(kind)
    store.set_optimizer("sgd", learning_rate=1.0)
    store.init(["w", "h"], [torch.zeros(4), torch.zeros(4, dtype=torch.float16)])
    value = torch.tensor([0.5, -1.0, 0.25, 0.75])
    for _ in range(64):
        store.push(["w", "h"], [[value, value], [value.half(), value.half()]])
    assert torch.allclose(stored(store, value) / -128, value, atol=0.06)


def test_integers_are_summed_as_they_are() -> None:
    store = kv.create("local")
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    store.init("w", torch.zeros(2, dtype=torch.int64))
    store.push("w", [torch.tensor([1, 2]), torch.tensor([3, 4])])
    assert stored(store, torch.zeros(2, dtype=torch.int64)).tolist() == [4, 6]


def test_what_cannot_be_compressed_is_an_error() -> None:
    store = kv.create("local")
    with pytest.raises(kv.Unsupported, match="leave out 'pull'"):
        store.set_gradient_compression({"type": "fp16", "pull": "fp16"})
    with pytest.raises(kv.UnknownName):
        store.set_gradient_compression({"type": "3bit"})
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    store.init(["a", "w"], [torch.zeros(2), torch.ones(4, 2)])
    with pytest.raises(kv.UsageError, match="infinite or NaN"):
        store.push(["a", "w"], [torch.ones(2), torch.full((4, 2), float("inf"))])
    with pytest.raises(kv.UsageError, match="rows of 'w', an array, cannot be compressed"):
        store.push(["a", "w"], [torch.ones(2), kv.RowSparse([1], torch.ones(1, 2))])
    store.push("a", torch.full((2,), 0.3))  # the first push of it: no residual is left of those that were refused
    out = torch.empty(2)
    store.pull("a", out)
    assert not out.any()
