"""Whole tables, read in pages while training goes on."""

from __future__ import annotations

import pytest
import torch
from threaded import ThreadedJob

from kvstore.client import DistStore
from kvstore.rows.row_sparse import RowSparse
from kvstore.table import MinCount, Table


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
