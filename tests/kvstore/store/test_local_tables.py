"""The tables of a store in one process: all of a call, or nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kvstore as kv
from kvstore.optim.optimizer import describe
from kvstore.rows.row_states import RowStates
from kvstore.store.local import LocalTables


def test_tables_are_made_together_or_not_at_all() -> None:
    tables = LocalTables(finite=False)
    tables.use(describe("sgd", {"lazy_update": False}))
    with pytest.raises(kv.UsageError, match="lazy_update"):
        tables.add({"a": kv.Table(shape=(2, 2)), "b": kv.Table(dim=2)})
    assert len(tables) == 0
    tables.add({"a": kv.Table(shape=(2, 2))})
    assert "a" in tables


def test_states_of_rows_that_are_not_there_yet() -> None:
    tables = LocalTables(finite=False)
    tables.use(describe("sgd", {"momentum": 0.5}))
    tables.add({"fixed": kv.Table(shape=(9, 2), init="constant"), "grows": kv.Table(dim=2, init="constant")})
    states = RowStates(np.array([3]), {"state.momentum_buffer": np.full((1, 2), 8, np.float32)}, 5)
    tables.load_states({"fixed": states, "grows": states})
    saved: dict[Any, torch.Tensor] = tables.states()
    assert saved["fixed", "rows.state.momentum_buffer"].tolist() == [[8, 8]]
    assert saved["fixed", "rows.steps"] == saved["grows", "rows.steps"] == 5
    assert len(saved["grows", "rows.ids"]) == 0
    assert tables.rows("fixed", np.array([3])).tolist() == [[1, 1]]
    with pytest.raises(kv.UsageError, match="file holds states of table 'other'"):
        tables.require_keys({"other": states}, "file")


def test_a_reading_that_is_given_up_keeps_nothing() -> None:
    store = kv.create()
    store.init("t", kv.Table(dim=2))
    store.push("t", kv.RowSparse(torch.arange(100), torch.ones(100, 2)))
    before = store.table_statistics("t")["bytes"]
    readings = [store.table_rows("t") for _ in range(2)]
    next(readings[0])
    assert store.table_statistics("t")["bytes"] > before
    readings.clear()
    assert store.table_statistics("t")["bytes"] == before


def test_an_update_leaves_the_sums_as_they_are() -> None:
    store = kv.create()
    store.set_optimizer("sgd", learning_rate=1.0, rescale_grad=3.0)
    store.init("t", kv.Table(shape=(9, 2)))
    value = kv.RowSparse([1, 2], torch.ones(2, 2))
    store.push("t", value)
    assert value.rows.unique().tolist() == [1]
