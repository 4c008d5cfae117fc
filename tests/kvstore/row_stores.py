"""What the suite of tables shares: the stores that it is run against, and a table of ten rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from store_kinds import Jobs, Kind, Run

import kvstore as kv

__all__ = ["Run", "each_of", "every", "in_rounds", "jobs", "run", "updating"]

ROWS, WIDTH = 10, 3
ONES = kv.Table(shape=(ROWS, WIDTH), init="constant")  # all rows are ones
BOUND = 300  # elements: arrays of so many are cut over the servers

LOCAL, SYNC, ASYNC = Kind("local"), Kind("dist_sync", 3, 2), Kind("dist_async", 3, 2)
ROUNDS = [LOCAL, SYNC]
MORE_ROUNDS = [
    Kind("device"),
    Kind("dist_sync", 1, 1),
    Kind("dist_device_sync", 2, 3),
    Kind("dist_sync", 2, 2, "curve"),
    Kind("dist_sync", 4, 2, aggregators=2),
]
QUORUM, SSP = Kind("dist_sync", 3, 2, quorum=3), Kind("dist_ssp", 2, 3)
MORE_UPDATES = [QUORUM, SSP, Kind("dist_async", 2, 2, "shm"), Kind("dist_async", 4, 2, aggregators=2)]


def each_of(kinds: list[Kind], slow: Sequence[Kind] = ()) -> Any:
    """Run a test against ``kinds``, and as a long one against ``slow``."""
    marked = [pytest.param(kind, marks=pytest.mark.long) for kind in slow]
    return pytest.mark.parametrize("run", [*kinds, *marked], ids=str, indirect=True)


every = each_of([*ROUNDS, ASYNC], [*MORE_ROUNDS, *MORE_UPDATES])  # with an optimizer
updating = each_of(ROUNDS, [*MORE_ROUNDS, QUORUM])  # with one, in rounds
in_rounds = each_of(ROUNDS, MORE_ROUNDS)  # in rounds that every worker is in


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    """One running job for each kind of dist store, for all tests of a module."""
    with Jobs(BOUND) as jobs:
        yield jobs


@pytest.fixture
def run(request: pytest.FixtureRequest, jobs: Jobs) -> Run:
    """Calls a function with a new store on every worker, and returns the results by rank."""
    return lambda work: jobs.run(request.param, work)


def begin(store: kv.KVStore, table: Any = ONES, lr: float = 1.0, key: Any = "t", **options: Any) -> None:
    store.set_optimizer("sgd", learning_rate=lr, **options)
    store.init(key, table)


def grads(ids: Any, value: float = 1.0, width: int = WIDTH) -> kv.RowSparse:
    count = torch.as_tensor(ids).numel()
    return kv.RowSparse(ids, torch.full((count, width), float(value)))


def firsts(store: kv.KVStore, ids: Any = None, key: Any = "t") -> list[float]:
    """The first element of each of the rows ``ids``, of all rows of the table by default."""
    rows = store.row_sparse_pull(key, row_ids=list(range(ROWS)) if ids is None else ids)
    assert bool((rows == rows[..., :1]).all()) or not rows.numel()
    return rows[..., 0].reshape(-1).tolist()


def settle(store: kv.KVStore, *tickets: kv.Ticket) -> None:
    """Return when the pushes of all workers have taken effect."""
    for ticket in tickets:
        ticket.wait()
    store.barrier()


def mine(store: kv.KVStore) -> int:
    return store.rank + 1


def all_of(store: kv.KVStore) -> int:
    return store.num_workers * (store.num_workers + 1) // 2
