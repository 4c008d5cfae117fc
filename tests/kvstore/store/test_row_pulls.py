"""Pulls of rows, in every store: any row_ids, any out, and pushes that bring rows back."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from row_stores import ONES, ROWS, WIDTH, all_of, begin, every, firsts, grads, in_rounds, jobs, mine, run, settle
from store_kinds import Run

import kvstore as kv

__all__ = ["jobs", "run"]


def numbered(store: kv.KVStore, key: Any = "t") -> None:
    """Make a table whose row n has elements of n."""
    rows = torch.arange(float(ROWS))[:, None].expand(ROWS, WIDTH)
    store.init(key, kv.RowSparse(torch.arange(ROWS), rows, (ROWS, WIDTH)))


ROW_IDS: list[Any] = [
    [3, 1, 3, 9],
    5,
    [],
    [[1, 2], [2, 0]],
    np.array([[[7]], [[0]]], np.int16),
    np.zeros((2, 0, 3), np.int64),
    torch.tensor([9, 8, 9, 8], dtype=torch.int32),
    torch.tensor(4),
    torch.arange(ROWS),
]


@every
def test_row_ids_of_any_shape_and_order(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        numbered(store)
        for row_ids in ROW_IDS:
            expected = torch.as_tensor(row_ids, dtype=torch.float32)
            rows = store.row_sparse_pull("t", row_ids=row_ids)
            assert rows.shape == (*expected.shape, WIDTH)
            assert torch.equal(rows, expected[..., None].expand_as(rows))
            ticket = store.row_sparse_pull("t", row_ids=row_ids, wait=False)
            assert torch.equal(ticket.wait(), rows)
            out = torch.full((*expected.shape, WIDTH), -1.0)
            assert isinstance(store.row_sparse_pull("t", out, 0, row_ids), kv.Ticket)
            assert torch.equal(out, rows)
            sparse = kv.RowSparse.zeros((ROWS, WIDTH))
            store.row_sparse_pull("t", out=sparse, row_ids=row_ids)
            assert sparse.ids.tolist() == sorted(set(expected.reshape(-1).int().tolist()))
            assert sparse.rows[:, 0].tolist() == sparse.ids.tolist()
            assert sparse.shape == (ROWS, WIDTH)

    run(work)


@every
def test_outs_of_every_kind(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        numbered(store)
        outs = [
            np.zeros((3, WIDTH), np.float32),
            torch.zeros(WIDTH, 3).t(),
            torch.zeros(3, 2 * WIDTH)[:, ::2],
            torch.nn.Parameter(torch.zeros(3, WIDTH)),
        ]
        for out in outs:
            store.row_sparse_pull("t", out=out, row_ids=[8, 2, 8])
            assert torch.as_tensor(out)[:, 0].tolist() == [8, 2, 8]
            assert torch.as_tensor(out)[:, -1].tolist() == [8, 2, 8]

    run(work)


@every
def test_one_row_ids_for_a_list_of_outs(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        numbered(store)
        outs = [torch.zeros(2, WIDTH), kv.RowSparse.zeros((ROWS, WIDTH)), np.zeros((2, WIDTH), np.float32)]
        for row_ids in (torch.tensor([6, 4]), [torch.tensor([6, 4])]):
            store.row_sparse_pull("t", out=outs, row_ids=row_ids)
            assert [out[:, 0].tolist() for out in (outs[0], outs[2])] == [[6, 4]] * 2
            assert outs[1].ids.tolist() == [4, 6]

    run(work)


@every
def test_row_ids_for_each_out_and_each_key(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        numbered(store)
        store.init("u", kv.Table(dim=2, init="constant", scale=0.5))
        outs = [torch.zeros(1, WIDTH), torch.zeros(2, WIDTH)]
        store.row_sparse_pull("t", out=outs, row_ids=[np.array([1]), np.array([2, 3])])
        assert [out[:, 0].tolist() for out in outs] == [[1], [2, 3]]
        both = store.row_sparse_pull(["t", "u"], row_ids=[[3], [[-7, 2**50]]])
        assert (both[0].tolist(), both[1].tolist()) == ([[3] * WIDTH], [[[0.5] * 2] * 2])
        several = store.row_sparse_pull(["t", "t"], row_ids=[[3], [np.array([4]), np.array([5])]])
        assert [several[0].tolist(), several[1][1].tolist()] == [[[3] * WIDTH], [[5] * WIDTH]]
        store.row_sparse_pull(
            ["t", "t"], out=[outs[0], [outs[0], outs[1]]], row_ids=[[3], [np.array([4]), np.array([5, 6])]]
        )
        assert [out[:, 0].tolist() for out in outs] == [[4], [5, 6]]

    run(work)


@every
def test_pulls_of_tables_by_mxnets_rules(run: Run) -> None:
    """``pull`` leaves them out, with one warning; or without ``ignore_sparse`` gets all rows."""

    def work(store: kv.KVStore) -> int:
        numbered(store)
        store.init(["w", "u"], [torch.ones(2), kv.Table(dim=2)])
        out, array = torch.full((ROWS, WIDTH), -1.0), torch.zeros(2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                store.pull(["t", "w"], [out, array])
                store.pull("t", out)
        assert out.unique().tolist() == [-1]
        assert array.tolist() == [1, 1]
        sparse = kv.RowSparse.zeros((ROWS, WIDTH))
        store.pull(["t", "w"], [[out, sparse], array], ignore_sparse=False)
        assert torch.equal(out[:, 0], torch.arange(float(ROWS)))
        assert torch.equal(sparse.to_dense(), out)
        with pytest.raises(kv.UsageError, match="row_sparse_pull"):
            store.pull("u", out, ignore_sparse=False)
        return sum("row_sparse_pull" in str(each.message) for each in caught)

    assert sum(run(work)) >= 1


@every
def test_arrays_have_no_rows_to_pull(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        store.init("w", torch.ones(4, 2))
        for call in (
            lambda: store.row_sparse_pull("w", out=torch.zeros(1, 2), row_ids=[0]),
            lambda: store.evict("w"),
            lambda: store.table_statistics("w"),
            lambda: store.put_rows("w", grads([0], 1.0, 2)),
        ):
            with pytest.raises(kv.Mismatch, match=r"'w' .*array"):
                call()
        with pytest.raises(kv.UsageError, match="'w'"):
            store.pushpull("w", torch.ones(4, 2), row_ids=[0])
        with pytest.raises(kv.KeyNotInitialized, match="'v'"):
            store.row_sparse_pull("v", row_ids=[0])

    run(work)


@every
def test_evaluation_makes_no_rows(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        store.init(
            ["u", "a"], [kv.Table(dim=2, init="normal", seed=5), kv.Table(dim=2, init="normal", admit=kv.MinCount(2))]
        )
        rows = store.row_sparse_pull("u", row_ids=[1, 2**40])
        assert torch.equal(rows, store.row_sparse_pull("u", row_ids=[1, 2**40]))
        assert rows.abs().min() > 0
        assert store.row_sparse_pull("a", row_ids=[1]).tolist() == [[0, 0]]  # it is not admitted
        assert store.table_statistics("u")["rows"] == store.table_statistics("a")["rows"] == 0

    run(work)


# ---- pushes that bring rows back


@in_rounds
def test_pushpull_brings_back_the_rows_that_are_wanted_next(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        begin(store)
        ticket = store.pushpull("t", grads([1, 2], mine(store)), row_ids=[[2, 5], [2, 1]])
        after = 1.0 - all_of(store)
        assert ticket.wait()[..., 0].tolist() == [[after, 1.0], [after, after]]
        out = torch.zeros(1, WIDTH)
        store.pushpull("t", kv.RowSparse.zeros((ROWS, WIDTH)), out, row_ids=[1])
        assert out[:, 0].tolist() == [after]
        pending = store.pushpull("t", grads([1], mine(store)), row_ids=[1], wait=False)
        assert pending.wait()[:, 0].tolist() == [after - all_of(store)]

    run(work)


@in_rounds
def test_pushpull_brings_back_by_default_what_is_pushed(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        begin(store)
        value = grads([7, 3, 7], mine(store))
        store.pushpull("t", value)
        assert value.ids.tolist() == [3, 7]
        assert value.rows[:, 0].tolist() == [1.0 - all_of(store), 1.0 - 2 * all_of(store)]
        out = torch.zeros(3, WIDTH)
        store.pushpull("t", grads([7, 3, 7], 0.0), out)
        assert out[:, 0].tolist() == [1.0 - 2 * all_of(store), 1.0 - all_of(store), 1.0 - 2 * all_of(store)]

    run(work)


@in_rounds
def test_pushpull_can_bring_back_all_rows_of_the_round(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        begin(store)
        value, out = grads([9 - store.rank, 9 - store.rank]), kv.RowSparse.zeros((ROWS, WIDTH))
        store.pushpull("t", value, out, row_ids="round")
        assert out.ids.tolist() == list(range(10 - store.num_workers, 10))
        assert out.rows.unique().tolist() == [-1]
        store.pushpull("t", value, row_ids="round")
        assert value.ids.tolist() == out.ids.tolist()
        assert value.rows.unique().tolist() == [-3]
        for wrong in (torch.zeros(2, WIDTH), "round"):
            with pytest.raises(kv.UsageError):
                store.pushpull("t", grads([1]), wrong, row_ids="round")
        with pytest.raises(kv.UsageError, match="row_ids"):
            store.row_sparse_pull("t", row_ids="round")

    run(work)


@in_rounds
def test_pushpull_of_tables_and_arrays_in_one_list(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init(["w", "t", "u"], [torch.ones(2), ONES, kv.Table(dim=2)])
        done = store.num_workers
        grad = torch.ones(2)
        result = store.pushpull(
            ["w", "t", "u"], [grad, grads([1]), grads([5], 1.0, 2)], row_ids=[None, [1, 0], [6, 5]]
        ).wait()
        assert grad.tolist() == [1 - done] * 2
        assert result[0] is grad
        assert result[1][:, 0].tolist() == [1 - done, 1]
        assert result[2][:, 0].tolist() == [0, -done]
        out, rows = torch.zeros(2), kv.RowSparse.zeros((ROWS, WIDTH))
        store.pushpull(["t", "w"], [grads([1]), torch.ones(2)], [rows, out], row_ids=[[1], None])
        assert out.tolist() == [1 - 2 * done] * 2
        assert rows.rows[:, 0].tolist() == [1 - 2 * done]
        store.pushpull(["t", "w"], [grads([1]), torch.ones(2)], [rows, out])
        assert rows.rows[:, 0].tolist() == [1 - 3 * done]

    run(work)


@every
def test_pushpull_without_rounds_brings_back_this_push(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        begin(store)
        rows = store.pushpull("t", grads([store.rank]), row_ids=[store.rank]).wait()
        assert rows[:, 0].tolist() == [0.0]
        settle(store)
        assert firsts(store)[: store.num_workers] == [0.0] * store.num_workers

    run(work)
