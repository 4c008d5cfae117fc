"""Rows of an array in a range of it: the same as if all elements had come, wherever the array is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.values import RowRange, RowWindow, TensorRange, cut, sum_ranges


@given(
    st.integers(1, 7),
    st.integers(1, 6),
    st.data(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
)
def test_rows_in_a_range_are_those_of_the_whole_array(width: int, count: int, data: st.DataObject, dtype: torch.dtype):
    size = width * count
    first = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(first + 1, size))
    window = RowWindow(first, stop - first, width)
    low, high = window.rows
    ids = np.array(sorted(data.draw(st.sets(st.integers(low, high - 1)))), np.int64)
    rows = torch.arange(1, 1 + len(ids) * width).view(-1, width).to(dtype)
    whole = torch.zeros(count, width, dtype=dtype)
    whole[torch.from_numpy(ids)] = rows
    expected, places = whole.view(-1)[first:stop], window.places(ids)

    flat = torch.full((window.size,), 5, dtype=dtype)
    part = RowRange(0, window, ids, rows)
    assert torch.equal(part.values, expected)
    part.write(flat, add=False)
    assert torch.equal(flat, expected)
    part.write(flat, add=True)
    assert torch.equal(flat, 2 * expected)
    back = torch.zeros_like(flat)
    places.put(back, places.gather(expected.clone()))
    assert torch.equal(back, expected)

    at = data.draw(st.integers(0, window.size))
    parts = [cut([part], 0, at), cut([part], at, window.size)]
    cuts = [each.values for (each,) in parts if each.window.size] if 0 < at < window.size else [part.values]
    assert torch.equal(torch.cat(cuts), expected)

    total = torch.empty_like(flat)
    sum_ranges(
        [[TensorRange(0, expected.clone())], [part], [TensorRange(0, expected[:at]), TensorRange(at, expected[at:])]],
        total,
    )
    assert torch.equal(total, 3 * expected)


@pytest.mark.gpu
def test_rows_of_an_array_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    window, ids = RowWindow(2, 10, 4), np.array([0, 1, 2], np.int64)
    rows = torch.arange(12.0).view(3, 4)
    on_cpu, on_gpu = torch.zeros(10), torch.zeros(10, device="cuda")
    places = window.places(ids)
    for flat in (on_cpu, on_gpu):
        places.put(flat, rows)
        places.add(flat, rows)
    assert torch.equal(on_cpu, on_gpu.cpu())
    assert torch.equal(places.gather(on_cpu), places.gather(on_gpu).cpu())
