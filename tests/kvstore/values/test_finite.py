"""Whether values are finite: in their own dtype, or in the one that they will have."""

from __future__ import annotations

import math

import pytest
import torch

from kvstore.values import all_finite


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_element_is_enough(dtype: torch.dtype, bad: float) -> None:
    values = torch.ones(1000, dtype=dtype)
    assert all_finite(values)
    values[517] = bad
    assert not all_finite(values)


def test_infinities_that_cancel_are_found() -> None:
    assert not all_finite(torch.tensor([math.inf, -math.inf]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_values_whose_sum_overflows_are_finite(dtype: torch.dtype) -> None:
    assert all_finite(torch.full((4,), torch.finfo(dtype).max, dtype=dtype))


def test_values_may_be_too_large_for_another_dtype() -> None:
    values = torch.tensor([1e5, 1.0])
    assert all_finite(values)
    assert not all_finite(values, torch.float16)
    assert not all_finite(torch.tensor([1e300], dtype=torch.float64), torch.float32)


def test_nothing_is_finite() -> None:
    assert all_finite(torch.empty(0))
