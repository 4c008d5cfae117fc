"""What users give becomes a tensor, where it can over the same memory; tensors of every kind, and their parts."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from odd_tensors import odd_tensors

from kvstore import UsageError
from workers.common.tensors import PLAIN, fingerprint, is_dense, overwrite, put_together, take_apart, to_tensor


def test_a_tensor_is_itself_and_an_array_shares_its_memory() -> None:
    tensor, array = torch.ones(2), np.ones(2)
    assert to_tensor(tensor) is tensor
    to_tensor(array)[0] = 5
    assert array.tolist() == [5, 1]


def test_numbers_and_lists_become_tensors() -> None:
    assert to_tensor([1.0, 2.0]).tolist() == [1, 2]
    assert to_tensor(3).item() == 3


def test_arrays_that_torch_cannot_read_are_copied() -> None:
    backwards, foreign = np.arange(4.0)[::-1], np.arange(4.0).astype(">f8")
    assert to_tensor(backwards).tolist() == [3, 2, 1, 0]
    assert to_tensor(foreign).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", odd_tensors(0))
def test_a_tensor_of_any_kind_comes_back_from_its_parts(name: str) -> None:
    tensor = odd_tensors(1)[name]
    form, parts = take_apart(tensor)
    assert {part.dtype for part in parts.values()} <= PLAIN
    assert all(is_dense(part) for part in parts.values())
    again = put_together(json.loads(json.dumps(form)), parts)
    assert (again.dtype, again.layout, again.shape) == (tensor.dtype, tensor.layout, tensor.shape)
    assert fingerprint(again) == fingerprint(tensor) != fingerprint(odd_tensors(0)[name])


@pytest.mark.parametrize("name", odd_tensors(0))
def test_a_tensor_of_any_kind_can_be_overwritten_where_it_lies(name: str) -> None:
    mine, value = odd_tensors(0)[name], odd_tensors(1)[name]
    overwrite(mine, put_together(*take_apart(value)))
    assert fingerprint(mine) == fingerprint(value)
    if mine.layout == torch.strided:
        assert mine.stride() == value.stride()


def test_equal_fingerprints_mean_equal_bits() -> None:
    zero = torch.zeros(3)
    assert fingerprint(zero) == fingerprint(torch.zeros(3).clone())
    others = [-zero, zero[:2], zero.view(3, 1), zero.double(), zero.to(torch.float8_e5m2), zero.to_sparse()]
    assert len({fingerprint(other) for other in [zero, *others]}) == 7
    nan = torch.tensor([float("nan"), float("-inf")])
    assert fingerprint(nan) == fingerprint(nan.clone())


def test_what_has_no_values_is_refused() -> None:
    with pytest.raises(UsageError, match=r"only dense, sparse and quantized .* not one without memory \(meta\)"):
        take_apart(torch.zeros(2, device="meta"))


def test_parts_that_do_not_fit_are_an_error_not_a_crash() -> None:
    form, parts = take_apart(torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match="damaged"):
        put_together({**form, "shape": [1, 1]}, parts)
    with pytest.raises(ValueError, match="damaged"):
        put_together({"kind": "bytes", "dtype": "load", "shape": [1]}, {"bytes": torch.zeros(1, dtype=torch.uint8)})
