"""Whole tables on servers: put in pages, and read in pages while training goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from placed import entries_for
from played_session import PlayedSession
from played_tables import PlayedTables
from threaded import ThreadedJob

from kvstore import wire
from kvstore.client import DistStore
from kvstore.client.plans import RowPlan
from kvstore.client.requests import Requests
from kvstore.client.stored_tables import StoredRows, StoredTables
from kvstore.errors import UsageError
from kvstore.rows.row_sparse import RowSparse
from kvstore.rule import Rule
from kvstore.table import MinCount, Table, TableSpec
from kvstore.ticket import WaitLimits


def test_rows_are_put_in_pages(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvstore.client.stored_tables.PAGE", 100)
    played = PlayedTables(2)
    played.store.init("t", Table(shape=(40, 3)))
    played.store.put_rows("t", RowSparse(range(30), torch.arange(90.0).view(30, 3)))
    assert max(message.count for message in played.asked(wire.PutRows)) == 5
    found = played.store.row_sparse_pull("t", row_ids=range(30))
    assert torch.equal(found, torch.arange(90.0).view(30, 3))
    with pytest.raises(UsageError, match="id 3 comes twice"):
        played.store.put_rows("t", RowSparse([3, 3], torch.ones(2, 3)))


def test_what_belongs_to_a_row_goes_with_it():
    session: Any = PlayedSession(2)
    entries = entries_for({"t": TableSpec.of(Table(shape=(40, 2)))}, 2, 10)
    stored = StoredTables(Requests(session, 1, Rule(), WaitLimits(1.0, 1.0)), entries.tables)
    session.asked.clear()
    parts = {"seen": np.array([7, 8]), "state.m": np.ones((2, 2), np.float32)}
    given = StoredRows(np.array([2, 4]), np.ones((2, 2), np.float32), parts, version=9, steps=3)
    stored.put("load_table", RowPlan(entries, ["t"]), "t", given)
    first, second = (message for _, message in session.asked)
    assert (first.count, second.count) == (2, 0), "the other server hears of the version, too"
    for message in (first, second):
        assert (message.version, message.steps) == (9, 3)
        assert (message.names, message.dtypes, message.columns) == (["seen", "state.m"], ["int64", "float32"], [0, 2])


def test_statistics_are_of_all_servers_and_evictions_follow_the_last_push():
    played = PlayedTables(2)
    played.store.init("g", Table(dim=2))
    played.store.push("g", RowSparse([1], torch.ones(1, 2)))
    assert played.store.table_statistics("g") == {"rows": 21, "version": 6}
    played.store.evict("g")
    assert [(message.id, message.clock) for message in played.asked(wire.EvictRows)] == [(0, 1), (1, 1)]


def test_whole_tables_are_read_replaced_and_counted(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        store.init("t", Table(dim=2, admit=MinCount(2)))
        far = range(0, 3000, 3)
        store.put_rows("t", RowSparse(far, torch.arange(1000.0)[:, None].expand(1000, 2)))
        store.barrier()
        reading = store.table_rows("t")
        store.push("t", RowSparse([3, 2**50], torch.full((2, 2), 7.0)))
        store.barrier()
        pages = list(reading)
        ids, rows = torch.cat([page.ids for page in pages]), torch.cat([page.rows for page in pages])
        order = ids.argsort()
        assert ids[order].tolist() == list(far)
        assert torch.equal(rows[order][:, 1], torch.arange(1000.0))
        assert store.row_sparse_pull("t", row_ids=[3, 2**50, 6])[:, 0].tolist() == [14, 0, 2]
        counts = store.table_statistics("t")
        assert (counts["rows"], counts["version"], counts["refused"]) == (1000, 1, 1)
        store.evict("t")
        store.barrier()

    cluster.run(work)


def test_pages_are_small_and_a_reading_that_is_left_ends(cluster: ThreadedJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.client.stored_tables.READ_PAGE", 1000)

    def work(store: DistStore) -> None:
        store.init("t", Table(dim=2))
        store.push("t", RowSparse(range(500), torch.ones(500, 2)))
        for _ in range(6):  # a server keeps no more than four for a worker: the others have gone
            reading = store.table_rows("t")
            assert 0 < len(next(iter(reading))) <= 1000 // 16
            reading.close()
        assert sum(len(page) for page in store.table_rows("t")) == 500

    cluster.run(work)
