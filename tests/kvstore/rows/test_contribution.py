"""What a worker pushes to a table: sums over duplicates and devices, and what is refused before anything is sent."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvstore as kv
from kvstore.rows.row_arguments import contribution, row_sparse

TABLE = kv.Table(shape=(10, 2))
WHAT = "push of key 't' by worker 3"


def test_duplicates_are_summed_and_ids_rise() -> None:
    ids, rows = contribution(WHAT, TABLE, [kv.RowSparse([7, 2, 7], torch.tensor([[1.0, 2], [3, 4], [5, 6]]))])
    assert (ids.tolist(), rows.tolist()) == ([2, 7], [[3, 4], [6, 8]])


def test_devices_are_summed_in_their_order() -> None:
    parts = [torch.full((1, 2), value) for value in (1e8, 1.0, -1e8)]
    ids, rows = contribution(WHAT, TABLE, [kv.RowSparse([4], part) for part in parts])
    assert (ids.tolist(), rows.tolist()) == ([4], [[float(np.float32(1e8) + np.float32(1) - np.float32(1e8))] * 2])


def test_rows_of_any_strides_are_taken() -> None:
    wide = torch.arange(12.0).view(3, 4)
    ids, rows = contribution(WHAT, TABLE, [kv.RowSparse([1, 2, 3], wide[:, ::2])])
    assert rows.tolist() == [[0, 2], [4, 6], [8, 10]]
    assert rows.flags.c_contiguous
    assert ids.tolist() == [1, 2, 3]


def test_rows_that_rise_already_are_not_copied() -> None:
    value = kv.RowSparse([1, 5], torch.ones(2, 2))
    _, rows = contribution(WHAT, TABLE, [value])
    assert rows.ctypes.data == value.rows.data_ptr()


def test_a_gradient_of_another_shape_fits_a_table_that_grows() -> None:
    value = kv.RowSparse([2**40], torch.ones(1, 2), (2**41, 2))
    assert row_sparse(WHAT, value, kv.Table(dim=2)) is value
    with pytest.raises(kv.Mismatch, match=WHAT):
        row_sparse(WHAT, value, TABLE)


def test_the_first_row_that_is_not_finite_is_named() -> None:
    rows = torch.ones(4, 2)
    rows[2, 1] = torch.inf
    value = kv.RowSparse([9, 8, 7, 6], rows)
    contribution(WHAT, TABLE, [value])
    with pytest.raises(kv.NotFinite, match=f"{WHAT}: the row of id 7 at position 2"):
        contribution(WHAT, TABLE, [value], finite=True)


def test_rows_with_nan_are_refused_though_nobody_checks() -> None:
    rows = torch.ones(4, 2)
    rows[0] = torch.tensor([torch.inf, -torch.inf])
    value = kv.RowSparse([9, 8, 7, 6], rows)
    contribution(WHAT, TABLE, [value])
    rows[3, 0] = torch.nan
    with pytest.raises(kv.NotFinite, match=f"{WHAT}: the row of id 6 at position 3 has elements that are NaN"):
        contribution(WHAT, TABLE, [value])
