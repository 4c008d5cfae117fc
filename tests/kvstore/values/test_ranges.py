"""Payloads in several buffers: cut and summed as if they were one."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import WireError
from kvstore.values import TensorRange, cut, ranges_of, sum_ranges, to_buffer

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
