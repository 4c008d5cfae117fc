"""What a worker pushes to a table: sums over duplicates and devices, and what is refused before anything is sent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore as kv
from kvstore.rows.row_arguments import Wanted, contribution, first_rows, given_rows, is_table, row_sparse

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


FIRST = "init of key 't' by worker 3"


def test_what_makes_a_table() -> None:
    value = kv.RowSparse([4, 1, 4], torch.ones(3, 2, dtype=torch.float64), (5, 2))
    assert [is_table(each) for each in (kv.Table(dim=2), value, value.to_sparse_coo(), torch.ones(2), 3)] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert first_rows(FIRST, kv.Table(dim=2)) == (kv.Table(dim=2), None)
    for each in (value, value.to_sparse_coo()):
        table, rows = first_rows(FIRST, each)
        assert table == kv.Table(shape=(5, 2), dtype="float64")
        assert rows is not None
        assert (rows[0].tolist(), rows[1].tolist()) == ([1, 4], [[1, 1], [2, 2]])


def test_rows_without_a_table_are_refused() -> None:
    with pytest.raises(kv.UsageError, match=f"{FIRST}: .* no shape"):
        first_rows(FIRST, kv.RowSparse([1], torch.ones(1, 2)))
    with pytest.raises(kv.UsageError, match=f"{FIRST}: dtype int64"):
        first_rows(FIRST, kv.RowSparse([1], torch.ones(1, 2, dtype=torch.int64), (2, 2)))


def test_each_row_is_replaced_once() -> None:
    table = kv.Table(shape=(5, 2))
    ids, rows = given_rows(FIRST, table, kv.RowSparse([3, 0], torch.tensor([[1.0, 2], [3, 4]])))
    assert (ids.tolist(), rows.tolist()) == ([0, 3], [[3, 4], [1, 2]])
    with pytest.raises(kv.UsageError, match=f"{FIRST}: id 3 comes twice"):
        given_rows(FIRST, table, kv.RowSparse([3, 0, 3], torch.ones(3, 2)))


ASKED_TABLE = kv.Table(dim=(1, 2))
ASKED = "row_sparse_pull of key 't' by worker 3"

ids_lists = st.lists(st.lists(st.integers(-5, 5), max_size=6), min_size=1, max_size=4)


def rows_of(ids: np.ndarray) -> np.ndarray:
    return np.stack([ids, -ids], axis=1).astype(np.float32)


@given(ids_lists)
@settings(max_examples=50, deadline=None)
def test_every_output_gets_the_rows_of_its_ids(lists: list[list[int]]) -> None:
    wanted = Wanted(ASKED, ASKED_TABLE)
    outs = [wanted.add(np.array(ids, np.int64), None) for ids in lists]
    sparse = [wanted.add(ids, kv.RowSparse.zeros((0, 1, 2))) for ids in lists]
    assert wanted.ids.tolist() == sorted({each for ids in lists for each in ids})
    wanted.write(rows_of(wanted.ids))
    for ids, out, rows in zip(lists, outs, sparse, strict=True):
        assert out.shape == (len(ids), 1, 2)
        assert out[:, 0, 0].tolist() == ids
        assert rows.ids.tolist() == sorted(set(ids))
        assert rows.rows[:, 0, 1].tolist() == [-each for each in sorted(set(ids))]
    assert not wanted.changed


def test_what_a_push_has_changed_is_not_known_before() -> None:
    wanted = Wanted(ASKED, ASKED_TABLE)
    out = wanted.add(None, kv.RowSparse([3], torch.zeros(1, 1, 2)))
    assert wanted.changed
    assert len(wanted.ids) == 0
    wanted.write_changed(np.array([1, 9]), rows_of(np.array([1, 9])))
    assert (out.ids.tolist(), out.rows[:, 0].tolist()) == ([1, 9], [[1, -1], [9, -9]])
    with pytest.raises(kv.UsageError, match="pass a RowSparse as out, not Tensor"):
        wanted.add(None, torch.zeros(1))


def test_what_became_rows_is_nobodys_memory() -> None:
    wanted = Wanted(ASKED, ASKED_TABLE)
    outs = [wanted.add([1, 2], kv.RowSparse.zeros((0, 1, 2))) for _ in range(2)]
    rows = rows_of(wanted.ids)
    wanted.write(rows)
    rows[:] = 99
    outs[0].rows.fill_(50)
    outs[0].ids.fill_(7)
    assert outs[1].rows[:, 0, 0].tolist() == outs[1].ids.tolist() == [1, 2]


def test_outputs_that_do_not_fit() -> None:
    wanted = Wanted(ASKED, ASKED_TABLE)
    with pytest.raises(kv.Mismatch, match=r"need an out of \[2, 1, 2\], but this is float32\[2, 2\]"):
        wanted.add([1, 2], torch.zeros(2, 2))
    with pytest.raises(kv.Mismatch, match=ASKED):
        wanted.add([1], kv.RowSparse.zeros((0, 2)))
