from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvstore.checkpoint.stateful import packed, unpacked
from kvstore.errors import CheckpointError, UsageError

ADAM = {
    "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.rand(2, 3)}},
    "param_groups": [{"lr": 0.1, "betas": (0.8, 0.9), "fused": None, "params": [0, 1]}],
}  # as torch.optim.Adam's state_dict is


def test_the_state_of_a_torch_optimizer_comes_back() -> None:
    state = {"adam": ADAM, "mask": torch.tensor([True, False]), "__tuple__": [1, None, "text"]}
    assert _equal(unpacked(*packed(state, "worker/")), state)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return list(one) == list(other) and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and all(_equal(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)


def test_tensors_are_copied() -> None:
    tensor = torch.ones(2)
    tensors, _ = packed({"a": tensor})
    tensor.zero_()
    assert tensors["0"].tolist() == [1, 1]


@pytest.mark.parametrize("state", [{"f": print}, [object()], {"c": torch.zeros(1, dtype=torch.complex64)}])
def test_what_is_not_plain_is_refused(state: Any) -> None:
    with pytest.raises(UsageError, match="checkpoint"):
        packed(state)


@pytest.mark.parametrize("text", ["{", '{"__tensor__": "9", "bool": false}', '{"__pairs__": [1]}'])
def test_damage_is_an_error(text: str) -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        unpacked({}, text)


def test_scalars_of_numpy_are_numbers() -> None:
    state = {"last": [np.float32(0.5), np.int64(3)], "best": np.array(0.25), "on": np.True_}
    assert unpacked(*packed(state)) == {"last": [0.5, 3], "best": 0.25, "on": True}
