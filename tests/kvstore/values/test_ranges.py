"""Payloads in several buffers: cut and summed as if they were one."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import WireError
from kvstore.values import TensorRange, cut, ranges_of, reduce_to, sum_in_order, sum_ranges, to_buffer

edges = st.lists(st.integers(0, 30), max_size=6)


def payload(size: int, at: list[int], seed: int = 0) -> tuple[torch.Tensor, list[TensorRange]]:
    whole = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    bounds = sorted({0, size, *(edge for edge in at if edge < size)})
    buffers = [to_buffer(whole[start:stop].clone()) for start, stop in itertools.pairwise(bounds)]
    return whole, ranges_of(buffers, "float32", size)


def joined(ranges: list[TensorRange], size: int) -> torch.Tensor:
    out = torch.full((size,), torch.nan)
    for each in ranges:
        out[each.start : each.stop] = each.values
    return out


@settings(max_examples=100)
@given(st.integers(0, 30), edges, st.integers(0, 30), st.integers(0, 30))
def test_a_cut_is_a_slice(size: int, at: list[int], one: int, other: int) -> None:
    start, stop = sorted((min(one, size), min(other, size)))
    whole, ranges = payload(size, at)
    assert torch.equal(joined(cut(ranges, start, stop), stop - start), whole[start:stop])


@settings(max_examples=100)
@given(st.integers(0, 30), st.lists(edges, min_size=1, max_size=4))
def test_the_sum_does_not_depend_on_how_payloads_are_divided(size: int, divisions: list[list[int]]) -> None:
    payloads = [payload(size, at, seed) for seed, at in enumerate(divisions)]
    out = torch.empty(size)
    sum_ranges([ranges for _, ranges in payloads], out)
    expected = payloads[0][0].clone()
    for whole, _ in payloads[1:]:
        expected += whole
    assert torch.equal(out, expected)
    assert all(torch.equal(joined(ranges, size), whole) for whole, ranges in payloads), "contributions do not change"


@pytest.mark.parametrize("lengths", [[8], [8, 12, 4], [16, 8], []])
def test_payloads_of_another_size_are_refused(lengths: list[int]) -> None:
    with pytest.raises(WireError, match="elements where 5 belong"):
        ranges_of([bytearray(length) for length in lengths], "float32", 5)


def test_a_buffer_that_ends_within_an_element_is_refused() -> None:
    with pytest.raises(WireError, match="within an element of float32"):
        ranges_of([bytearray(10), bytearray(10)], "float32", 5)


CPU = torch.device("cpu")


def test_the_order_is_the_order_given() -> None:
    big, one = torch.tensor([2.0**24]), torch.tensor([1.0])
    assert sum_in_order([big, one, one]).item() == 2.0**24
    assert sum_in_order([one, one, big]).item() == 2.0**24 + 2


def test_the_sum_is_that_of_a_loop_to_the_bit() -> None:
    parts = [torch.randn(1001, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    assert torch.equal(sum_in_order(parts), total)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    parts = [torch.full((4,), value, dtype=dtype) for value in (256.0, *[0.5] * 8)]
    plain = parts[0].clone()
    for part in parts[1:]:
        plain += part
    total = sum_in_order(parts)
    assert total.dtype == dtype
    assert torch.equal(total, torch.full((4,), 260.0, dtype=dtype))
    if dtype == torch.bfloat16:
        assert not torch.equal(plain, total)  # which is what this is about


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64, torch.float64])
def test_other_dtypes_stay(dtype: torch.dtype) -> None:
    total = sum_in_order([torch.tensor([1, 2], dtype=dtype)] * 3)
    assert total.dtype == dtype
    assert total.tolist() == [3, 6]


def test_the_inputs_stay_as_they_were() -> None:
    for dtype in (torch.float32, torch.float16):
        parts = [torch.ones(3, dtype=dtype) for _ in range(3)]
        total = sum_in_order(parts)
        assert all(part.tolist() == [1, 1, 1] for part in parts)
        assert all(total.data_ptr() != part.data_ptr() for part in parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_sum_goes_where_it_is_wanted_and_changes_nothing_else(count: int, dtype: torch.dtype) -> None:
    parts = [torch.ones(3, dtype=dtype) for _ in range(count)]
    out = torch.full((3,), 9, dtype=dtype)
    assert sum_in_order(parts, out=out) is out
    assert out.tolist() == [count] * 3
    assert all(part.tolist() == [1] * 3 for part in parts)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wide", [(), (0,), (1,), (0, 1, 2)])
def test_a_sum_of_half_precision_can_stay_in_float32(dtype: torch.dtype, wide: tuple[int, ...]) -> None:
    parts = [torch.full((2,), number, dtype=dtype) for number in (40_000.0, 40_000.0, 2.0**-7)]
    parts = [part.float() if place in wide else part for place, part in enumerate(parts)]
    expected = 2 * parts[0].float() + 2.0**-7
    for total in (sum_in_order(parts, dtype=torch.float32), sum_in_order(parts, out=torch.empty(2))):
        assert total.dtype == torch.float32
        assert torch.equal(total, expected)
    assert torch.equal(sum_in_order(parts, out=torch.empty(2, dtype=dtype)), expected.to(dtype))
    assert [part[0].item() for part in parts] == [parts[0][0].item()] * 2 + [2.0**-7]


def test_a_single_value_is_returned_as_it_is() -> None:
    one = torch.ones(3)
    assert sum_in_order([one]) is one
    assert reduce_to([one], CPU) is one


def test_strided_and_empty_values() -> None:
    assert sum_in_order([torch.ones(2, 3).t(), torch.ones(3, 2)]).tolist() == [[2, 2]] * 3
    assert reduce_to([torch.zeros(0), torch.zeros(0)], CPU).shape == (0,)
