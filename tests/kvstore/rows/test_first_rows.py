"""Rows that a table begins with, and rows that replace others."""

from __future__ import annotations

import pytest
import torch

import kvstore as kv
from kvstore.rows.row_arguments import first_rows, given_rows, is_table

WHAT = "init of key 't' by worker 3"


def test_what_makes_a_table() -> None:
    value = kv.RowSparse([4, 1, 4], torch.ones(3, 2, dtype=torch.float64), (5, 2))
    assert [is_table(each) for each in (kv.Table(dim=2), value, value.to_sparse_coo(), torch.ones(2), 3)] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert first_rows(WHAT, kv.Table(dim=2)) == (kv.Table(dim=2), None)
    for each in (value, value.to_sparse_coo()):
        table, rows = first_rows(WHAT, each)
        assert table == kv.Table(shape=(5, 2), dtype="float64")
        assert rows is not None
        assert (rows[0].tolist(), rows[1].tolist()) == ([1, 4], [[1, 1], [2, 2]])


def test_rows_without_a_table_are_refused() -> None:
    with pytest.raises(kv.UsageError, match=f"{WHAT}: .* no shape"):
        first_rows(WHAT, kv.RowSparse([1], torch.ones(1, 2)))
    with pytest.raises(kv.UsageError, match=f"{WHAT}: dtype int64"):
        first_rows(WHAT, kv.RowSparse([1], torch.ones(1, 2, dtype=torch.int64), (2, 2)))


def test_each_row_is_replaced_once() -> None:
    table = kv.Table(shape=(5, 2))
    ids, rows = given_rows(WHAT, table, kv.RowSparse([3, 0], torch.tensor([[1.0, 2], [3, 4]])))
    assert (ids.tolist(), rows.tolist()) == ([0, 3], [[3, 4], [1, 2]])
    with pytest.raises(kv.UsageError, match=f"{WHAT}: id 3 comes twice"):
        given_rows(WHAT, table, kv.RowSparse([3, 0, 3], torch.ones(3, 2)))
