"""Tables in jobs: what rounds make of rows, whatever the number of servers; joins, states, and what is read whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from threaded import ThreadedJob

import kvstore as kv
from kvstore.client import DistStore
from kvstore.rows.row_sparse import RowSparse
from kvstore.rule import Rule
from kvstore.store.local import LocalStore
from kvstore.table import Table

ROWS, WIDTH = 60, 5
FIXED = Table(shape=(ROWS, WIDTH), init="uniform", scale=0.5, seed=3)
GROWING = Table(dim=WIDTH, init="normal", scale=0.1, seed=4)
FAR = torch.tensor([2**61, -7, 12, 2**40, 99, -(2**62)])


def gradient(table: str, step: int, rank: int) -> RowSparse:
    """Rows with duplicates, in no order; what each worker pushes in a step."""
    draws = np.random.default_rng([step, rank, table == "grown"])
    ids = draws.integers(0, ROWS if table == "fixed" else len(FAR), 11)
    rows = torch.from_numpy(draws.normal(size=(11, WIDTH)).astype(np.float32))
    return RowSparse(ids if table == "fixed" else FAR[ids], rows)


def trained(store: Any, steps: int = 5) -> list[torch.Tensor]:
    """Train two tables and an array together; return them."""
    store.set_optimizer("adam", learning_rate=0.1)
    store.init(["fixed", "a", "grown"], [FIXED, torch.ones(3), GROWING])
    outs = [torch.zeros(ROWS, WIDTH), torch.zeros(3), torch.zeros(len(FAR), WIDTH)]
    for step in range(steps):
        grads = [
            gradient("fixed", step, store.rank),
            torch.full((3,), 1.0 + store.rank),
            gradient("grown", step, store.rank),
        ]
        if step == 2:
            grads[0] = RowSparse.zeros((ROWS, WIDTH))
        store.pushpull(["fixed", "a", "grown"], grads, outs, row_ids=[range(ROWS), None, FAR])
    return outs


@pytest.fixture(scope="module")
def jobs() -> Any:
    """Jobs of one, two and four servers, and two workers."""
    made: dict[int, ThreadedJob] = {}

    def job(servers: int) -> ThreadedJob:
        if servers not in made:
            made[servers] = ThreadedJob(2, servers).__enter__()
        return made[servers]

    yield job
    for each in made.values():
        each.__exit__()


def test_all_numbers_of_servers_make_the_same_bits(jobs: Any) -> None:
    results = [jobs(servers).run(trained) for servers in (1, 2, 4)]
    for of_worker in (each for result in results for each in result):
        for found, wanted in zip(of_worker, results[0][0], strict=True):
            assert torch.equal(found, wanted)


def test_one_worker_makes_the_bits_of_a_store_in_one_process() -> None:
    with ThreadedJob(1, 2) as job:
        (found,) = job.run(trained)
    for one, other in zip(found, trained(LocalStore()), strict=True):
        assert torch.equal(one, other)


def test_rounds_go_on_without_a_worker_that_has_joined(jobs: Any) -> None:
    def work(store: DistStore) -> list[float]:
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init("t", Table(shape=(ROWS, 1)))
        for _ in range(4 if store.rank else 2):
            store.push("t", RowSparse([7, 10 + store.rank], torch.ones(2, 1)))
        store.join()
        store.push("t", RowSparse([8], torch.ones(1, 1)))
        return store.row_sparse_pull("t", row_ids=[7, 8, 10, 11]).view(-1).tolist()

    assert jobs(2).run(work) == [[-6, -2, -2, -4]] * 2


@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_without_rounds_each_push_is_an_update(jobs: Any, mode: str) -> None:
    def work(store: DistStore) -> list[float]:
        if store.rank == 0:
            store.set_optimizer("sgd", learning_rate=1.0)
        store.barrier()
        store.init("t", Table(dim=1))
        for _ in range(3):
            own = store.pushpull("t", RowSparse([1, store.rank + 2], torch.ones(2, 1)), row_ids=[store.rank + 2])
        assert float(own.wait()) == -3
        store.barrier()
        return store.row_sparse_pull("t", row_ids=[1, 2, 3]).view(-1).tolist()

    rule = Rule("async", staleness=3) if mode == "ssp" else Rule("async")
    assert jobs(2).run(work, rule=rule) == [[-6, -3, -3]] * 2


def test_the_rows_of_a_round_are_those_of_all_workers(jobs: Any) -> None:
    def work(store: DistStore) -> tuple[list[int], list[float]]:
        store.init("t", Table(shape=(ROWS, 2), dtype="float64"))
        grad = RowSparse([20 - store.rank, 5], torch.full((2, 2), 1.0 + store.rank, dtype=torch.float64))
        out = RowSparse.zeros((ROWS, 2), torch.float64)
        store.pushpull("t", grad, out, row_ids="round")
        return out.ids.tolist(), out.rows[:, 0].tolist()

    assert jobs(2).run(work) == [([5, 19, 20], [3, 2, 1])] * 2


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8"])
def test_rows_travel_in_fewer_bytes(jobs: Any, codec: str) -> None:
    def work(store: DistStore) -> None:
        store.init("t", Table(shape=(ROWS, 8), codec=codec))
        grad = torch.randn(20, 8, generator=torch.Generator().manual_seed(store.rank))
        store.push("t", RowSparse(range(20), grad))
        found = store.row_sparse_pull("t", row_ids=range(20))
        total = sum(torch.randn(20, 8, generator=torch.Generator().manual_seed(rank)) for rank in range(2))
        assert 0 < float((found - total).abs().max()) < 0.1
        assert store.statistics().bytes_pushed <= 20 * 8 * 2 + 64

    jobs(2).run(work)


def test_a_push_of_nan_is_refused_before_anybody_hears_of_it(jobs: Any) -> None:
    def work(store: DistStore) -> list[float]:
        store.init("t", Table(shape=(ROWS, 1)))
        if store.rank == 1:
            with pytest.raises(kv.NotFinite, match="'t' by worker 1: the row of id 3 at position 1"):
                store.push("t", RowSparse([2, 3], torch.tensor([[1.0], [float("inf")]])))
            assert store.statistics().pushes == 0
        store.push("t", RowSparse([2, 3], torch.ones(2, 1)))
        return store.row_sparse_pull("t", row_ids=[2, 3]).view(-1).tolist()

    assert jobs(2).run(work, rule=Rule(finite=True)) == [[2, 2]] * 2
