"""What ``init`` is given: keys that are new and different, and arrays of few specs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from placed import entries_for

from kvstore.client.calls import distinct, new_arrays
from kvstore.errors import AlreadyInitialized, UsageError
from kvstore.spec import Spec
from kvstore.values import tensors_of

KNOWN = entries_for({"old": Spec((3,), "float32")}, 1, 100)


@pytest.mark.parametrize(
    ("key", "value", "arrays"),
    [("w", 1.0, [[1.0]]), (["w", "v"], [1.0, [2.0, 3.0]], [[1.0], [2.0, 3.0]]), (("w",), [1.0], [1.0])],
)
def test_each_new_key_has_its_arrays(key: Any, value: Any, arrays: list[list[float]]) -> None:
    keys, values, kind = new_arrays(key, value, KNOWN, str)
    assert keys == [*key]
    assert kind is str
    assert values == arrays


@pytest.mark.parametrize(
    ("key", "error", "match"),
    [
        (["w", "old"], AlreadyInitialized, "'old' is already initialized"),
        (["w", "w"], UsageError, "given a key twice"),
        ([3, 4], UsageError, "key"),
    ],
)
def test_keys_that_cannot_be_new(key: list[Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        new_arrays(key, [torch.zeros(3)] * 2, KNOWN, str)


def test_arrays_of_one_spec_share_it_and_are_contiguous() -> None:
    columns = torch.arange(6.0).reshape(2, 3).t()
    numbers, specs, values = distinct([torch.zeros(2), [columns, torch.ones(3, 2)], torch.ones(2)])
    assert numbers == [0, 1, 0]
    assert specs == [Spec((2,), "float32"), Spec((3, 2), "float32")]
    tensors = tensors_of(values)
    assert torch.equal(tensors[1], columns)
    assert all(tensor.is_contiguous() for tensor in tensors)
