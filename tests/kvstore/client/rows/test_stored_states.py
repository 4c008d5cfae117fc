"""States of rows in files: by id, so that any number of servers takes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from threaded import ThreadedJob

from kvstore.client import DistStore
from kvstore.errors import UsageError
from kvstore.rows.row_sparse import RowSparse
from kvstore.table import Table

ROWS, WIDTH = 30, 4
FAR = torch.tensor([2**61, -7, 12, 2**40, 99])


def pushed(store: DistStore, step: int) -> None:
    """Push some rows of both tables, the same whatever the number of workers and servers."""
    draws = torch.Generator().manual_seed(step)
    ids = torch.randint(ROWS, (9,), generator=draws)
    rows = torch.randn(9, WIDTH, generator=draws)
    mine = store.rank == 0
    fixed = RowSparse(ids, rows) if mine else RowSparse.zeros((ROWS, WIDTH))
    grown = RowSparse(FAR[ids % len(FAR)], rows) if mine else RowSparse.zeros((0, WIDTH))
    store.push(["fixed", "grown"], [fixed, grown])


def begun(store: DistStore) -> None:
    store.set_optimizer("adam", learning_rate=0.1)
    tables = [Table(shape=(ROWS, WIDTH), init="normal", seed=1), Table(dim=WIDTH)]
    store.init(["fixed", "grown"], tables)
    for step in range(3):
        pushed(store, step)


def further(store: DistStore) -> list[torch.Tensor]:
    pushed(store, 9)
    return store.row_sparse_pull(["fixed", "grown"], row_ids=[range(ROWS), FAR])


def test_states_are_saved_by_id_and_loaded_into_another_number_of_servers(
    cluster: ThreadedJob, three: ThreadedJob, tmp_path: Path
) -> None:
    def first(store: DistStore) -> list[torch.Tensor]:
        begun(store)
        if store.rank == 0:
            store.save_optimizer_states(tmp_path / "states")
        store.barrier()
        return further(store)

    def second(store: DistStore) -> list[torch.Tensor]:
        begun(store)
        store.set_optimizer("sgd", learning_rate=0.1)  # which forgets the states
        store.set_optimizer("adam", learning_rate=0.1)
        store.load_optimizer_states(tmp_path / "states")
        store.barrier()
        return further(store)

    wanted, found = cluster.run(first)[0], three.run(second)[0]
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_states_of_tables_that_there_are_not(tmp_path: Path) -> None:
    with ThreadedJob(1, 1) as job:

        def save(store: DistStore) -> None:
            begun(store)
            store.save_optimizer_states(tmp_path / "states")

        def load(store: DistStore) -> None:
            store.set_optimizer("adam", learning_rate=0.1)
            store.init("fixed", Table(shape=(ROWS, WIDTH)))
            with pytest.raises(UsageError, match="states of table 'grown', which has not been initialized"):
                store.load_optimizer_states(tmp_path / "states")

        job.run(save)
        job.run(load)
