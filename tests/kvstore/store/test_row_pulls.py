"""Pulls of rows, in every store: any row_ids, any out, pushes that bring rows back; and calls that are refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from every_store import all_of, mine, settle
from row_stores import (
    ASYNC,
    LOCAL,
    ONES,
    ROUNDS,
    ROWS,
    SSP,
    SYNC,
    WIDTH,
    begin,
    each_of,
    every,
    firsts,
    grads,
    in_rounds,
)
from small_jobs import SOON
from store_kinds import Jobs, Kind, Run

import kvstore as kv
from kvstore.client import DistStore
from kvstore.rule import Rule
from kvstore.ticket import WaitLimits


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
def test_row_ids_of_any_shape_and_order(store: kv.KVStore) -> None:
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


@every
def test_outs_of_every_kind(store: kv.KVStore) -> None:
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


@every
def test_one_row_ids_for_a_list_of_outs(store: kv.KVStore) -> None:
    numbered(store)
    outs = [torch.zeros(2, WIDTH), kv.RowSparse.zeros((ROWS, WIDTH)), np.zeros((2, WIDTH), np.float32)]
    for row_ids in (torch.tensor([6, 4]), [torch.tensor([6, 4])]):
        store.row_sparse_pull("t", out=outs, row_ids=row_ids)
        assert [out[:, 0].tolist() for out in (outs[0], outs[2])] == [[6, 4]] * 2
        assert outs[1].ids.tolist() == [4, 6]


@every
def test_row_ids_for_each_out_and_each_key(store: kv.KVStore) -> None:
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
def test_arrays_have_no_rows_to_pull(store: kv.KVStore) -> None:
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


@every
def test_evaluation_makes_no_rows(store: kv.KVStore) -> None:
    store.init(
        ["u", "a"], [kv.Table(dim=2, init="normal", seed=5), kv.Table(dim=2, init="normal", admit=kv.MinCount(2))]
    )
    rows = store.row_sparse_pull("u", row_ids=[1, 2**40])
    assert torch.equal(rows, store.row_sparse_pull("u", row_ids=[1, 2**40]))
    assert rows.abs().min() > 0
    assert store.row_sparse_pull("a", row_ids=[1]).tolist() == [[0, 0]]  # it is not admitted
    assert store.table_statistics("u")["rows"] == store.table_statistics("a")["rows"] == 0


# ---- pushes that bring rows back


@in_rounds
def test_pushpull_brings_back_the_rows_that_are_wanted_next(store: kv.KVStore) -> None:
    begin(store)
    ticket = store.pushpull("t", grads([1, 2], mine(store)), row_ids=[[2, 5], [2, 1]])
    after = 1.0 - all_of(store)
    assert ticket.wait()[..., 0].tolist() == [[after, 1.0], [after, after]]
    out = torch.zeros(1, WIDTH)
    store.pushpull("t", kv.RowSparse.zeros((ROWS, WIDTH)), out, row_ids=[1])
    assert out[:, 0].tolist() == [after]
    pending = store.pushpull("t", grads([1], mine(store)), row_ids=[1], wait=False)
    assert pending.wait()[:, 0].tolist() == [after - all_of(store)]


@in_rounds
def test_pushpull_brings_back_by_default_what_is_pushed(store: kv.KVStore) -> None:
    begin(store)
    value = grads([7, 3, 7], mine(store))
    store.pushpull("t", value)
    assert value.ids.tolist() == [3, 7]
    assert value.rows[:, 0].tolist() == [1.0 - all_of(store), 1.0 - 2 * all_of(store)]
    out = torch.zeros(3, WIDTH)
    store.pushpull("t", grads([7, 3, 7], 0.0), out)
    assert out[:, 0].tolist() == [1.0 - 2 * all_of(store), 1.0 - all_of(store), 1.0 - 2 * all_of(store)]


@in_rounds
def test_pushpull_can_bring_back_all_rows_of_the_round(store: kv.KVStore) -> None:
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


@in_rounds
def test_pushpull_of_tables_and_arrays_in_one_list(store: kv.KVStore) -> None:
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


@every
def test_pushpull_without_rounds_brings_back_this_push(store: kv.KVStore) -> None:
    begin(store)
    rows = store.pushpull("t", grads([store.rank]), row_ids=[store.rank]).wait()
    assert rows[:, 0].tolist() == [0.0]
    settle(store)
    assert firsts(store)[: store.num_workers] == [0.0] * store.num_workers


def unchecked(ids: Any, rows: Any) -> kv.RowSparse:
    """A value whose parts have been changed since it was made."""
    value = grads([0])
    value.ids, value.rows = torch.as_tensor(ids), torch.as_tensor(rows)
    return value


def coo(ids: Any, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([ids]), torch.ones(len(ids), *shape[1:]), shape, check_invariants=True)


ROW = torch.ones(1, WIDTH)
BAD_VALUES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: grads([1, 10]), kv.UsageError, "id 10 at position 1 .*0 to 9"),
    (lambda: grads([-1]), kv.UsageError, "id -1 at position 0"),
    (lambda: [grads([1]), grads([3, 2**40])], kv.UsageError, f"id {2**40} at position 1"),
    (lambda: coo([10], (11, WIDTH)), kv.Mismatch, r"float32\[10, 3\].*11"),
    (lambda: kv.RowSparse([1], torch.ones(1, 4)), kv.Mismatch, r"float32\[10, 3\].*4\]"),
    (lambda: kv.RowSparse([1], torch.ones(1, 3, 1)), kv.Mismatch, r"float32\[10, 3\]"),
    (lambda: kv.RowSparse([1], ROW.double()), kv.Mismatch, "float64"),
    (lambda: kv.RowSparse([1], ROW.half()), kv.Mismatch, "float16"),
    (lambda: torch.ones(ROWS, WIDTH), kv.Mismatch, "RowSparse"),
    (lambda: torch.eye(ROWS).to_sparse(), kv.UsageError, "2 sparse"),
    (lambda: unchecked([0, 1], ROW), kv.UsageError, "2 ids"),
]
BAD_IDS: list[tuple[Any, str]] = [
    ([3, 10], "id 10 at position 1"),
    ([[3], [-4]], r"id -4 at position \(1, 0\)"),
    ([0.5], "integers"),
    (torch.tensor([1.0]), "integers"),
    ([True, False], "integers"),
    (["a"], "integers"),
    ("all", "row_ids"),
    ([[0], [1, 2]], "integers"),
    (np.array([2**64 - 1], np.uint64), "int64"),
]


@every
def test_pushes_that_are_refused_are_no_pushes(store: kv.KVStore) -> None:
    begin(store)
    store.init("w", torch.ones(2))
    for make, error, text in BAD_VALUES:
        for call in (
            lambda make=make: store.push("t", make()),
            lambda make=make: store.pushpull("t", make(), row_ids=[0]),
            lambda make=make: store.push(["w", "t"], [torch.ones(2), make()]),
        ):
            with pytest.raises(error, match=text) as caught:
                call()
            assert "'t'" in str(caught.value)
            assert f"worker {store.rank}" in str(caught.value)
    with pytest.raises(kv.UsageError, match="'w'"):
        store.push(["t", "w"], [grads([0]), grads([0])])
    assert store.statistics().pushes == 0
    settle(store, store.push(["t", "w"], [grads([0]), torch.ones(2)]))
    out = torch.empty(2)
    store.pull("w", out)
    assert firsts(store, [0, 1]) == [1.0 - store.num_workers, 1.0]
    assert out.tolist() == [1.0 - store.num_workers] * 2


@every
def test_row_ids_and_outs_that_are_refused(store: kv.KVStore) -> None:
    begin(store)
    for row_ids, text in BAD_IDS:
        for call in (
            lambda row_ids=row_ids: store.row_sparse_pull("t", row_ids=row_ids),
            lambda row_ids=row_ids: store.pushpull("t", grads([0]), row_ids=row_ids),
        ):
            with pytest.raises(kv.UsageError, match=text) as caught:
                call()
            assert "'t'" in str(caught.value)
            assert f"worker {store.rank}" in str(caught.value)
    fixed = np.zeros((2, WIDTH), np.float32)
    fixed.flags.writeable = False
    for out, text in (
        (torch.zeros(2, 4), r"\[2, 3\]"),
        (torch.zeros(3, WIDTH), r"\[2, 3\]"),
        (torch.zeros(2, WIDTH).double(), "float64"),
        (kv.RowSparse.zeros((ROWS, 4)), r"4\]"),
        (kv.RowSparse.zeros((ROWS + 1, WIDTH)), "11"),
        (torch.eye(ROWS).to_sparse(), "spars"),
        (fixed, "read-only"),
        ("out", "out"),
    ):
        with pytest.raises(kv.UsageError, match=text):
            store.row_sparse_pull("t", out=out, row_ids=[0, 1])
        with pytest.raises(kv.UsageError, match=text):
            store.pushpull("t", grads([0, 1]), out, row_ids=[0, 1])
    with pytest.raises(kv.UsageError, match="row_ids is missing"):
        store.row_sparse_pull("t", out=torch.zeros(1, WIDTH))
    assert store.statistics().pushes == 0
    settle(store)
    assert firsts(store) == [1.0] * ROWS


@every
def test_rows_with_nan(run: Run) -> None:
    _refused(run, float("nan"))


@each_of([replace(kind, finite=True) for kind in (*ROUNDS, ASYNC)])
def test_rows_that_are_not_finite(run: Run) -> None:
    _refused(run, float("inf"))


def _refused(run: Run, element: float) -> None:
    def work(store: kv.KVStore) -> None:
        begin(store)
        value = grads([4, 2, 7])
        value.rows[1, 2] = element
        with pytest.raises(kv.NotFinite, match=rf"'t' by worker {store.rank}.* id 2 at position 1"):
            store.push("t", value)
        settle(store, store.push("t", grads([2])))
        assert firsts(store, [2, 4]) == [1.0 - store.num_workers, 1.0]

    run(work)


@every
def test_tables_that_cannot_be_made(store: kv.KVStore) -> None:
    for bad, text in (
        (kv.RowSparse([0], ROW), "no shape"),
        (torch.eye(3).to_sparse(), "2 sparse"),
        (kv.RowSparse([0], ROW.int(), (ROWS, WIDTH)), "dtype int32"),
    ):
        with pytest.raises(kv.UsageError, match=text):
            store.init("t", bad)
    store.init("t", ONES)
    store.init("w", torch.ones(2))
    for key, value in (("t", ONES), ("t", torch.ones(2)), ("w", ONES), (["u", "t"], [ONES, ONES])):
        with pytest.raises(kv.AlreadyInitialized, match=r"'[tw]'"):
            store.init(key, value)
    assert firsts(store) == [1.0] * ROWS
    store.barrier()


@each_of([LOCAL, SYNC])
def test_tables_after_an_optimizer_that_has_no_rule_for_rows(store: kv.KVStore) -> None:
    store.set_optimizer("lamb")
    with pytest.raises(kv.UsageError, match=r"lamb.*sgd"):
        store.init(["w", "t"], [torch.ones(2), ONES])
    store.init("w", torch.ones(2))  # which the call that failed has not done


def test_delay_compensation_is_for_arrays(jobs: Jobs) -> None:
    def work(session: Any) -> None:
        with DistStore(session, "dist_async", Rule("async", compensation=0.5)) as store:
            store.set_optimizer("sgd")
            with pytest.raises(kv.UsageError, match="delay_compensation"):
                store.init("t", ONES)
            store.init("w", torch.ones(2))

    jobs.job(ASYNC).run_sessions(work)


@each_of([SYNC])
def test_who_is_waited_for_is_named(store: kv.KVStore) -> None:
    store.init("t", ONES)
    store.barrier()
    limits = store.limits
    if store.rank == 0:
        store.push("t", grads([1]))
        store.limits = WaitLimits(SOON, SOON)
        for call in (
            lambda: store.row_sparse_pull("t", row_ids=[1]),
            lambda: store.pushpull("t", grads([1]), row_ids=[1]),
            lambda: list(store.table_rows("t")),
        ):
            with pytest.raises(kv.DeadlineExceeded, match=r"worker [12], whose push 1 of 't' is missing"):
                call()
        store.limits = limits
    store.barrier()
    for _ in range(2 if store.rank else 0):
        store.push("t", grads([1]))
    assert firsts(store, [0, 1]) == [1.0, store.num_workers]


@each_of([ASYNC], long=[SSP])
def test_pushes_that_are_updates_need_an_optimizer(store: kv.KVStore) -> None:
    store.init("t", ONES)
    with pytest.raises(kv.UsageError, match="set_optimizer"):
        store.push("t", grads([0]))


@every
def test_a_closed_store_has_no_rows(store: kv.KVStore) -> None:
    store.init("t", ONES)
    store.barrier()
    store.close()
    for call in (
        lambda: store.push("t", grads([0])),
        lambda: store.row_sparse_pull("t", row_ids=[0]),
        lambda: store.pushpull("t", grads([0]), row_ids=[0]),
        lambda: store.evict("t"),
        lambda: store.table_statistics("t"),
        lambda: store.put_rows("t", grads([0])),
    ):
        with pytest.raises(kv.UsageError, match="closed"):
            call()


@each_of([LOCAL, Kind("device")])
def test_an_updater_of_ones_own_gets_the_rows_that_are_pushed(store: kv.KVStore) -> None:
    seen: list[Any] = []

    def updater(key: Any, pushed: Any, stored: Any) -> None:
        seen.append((key, pushed.ids.tolist(), stored.rows.tolist()))
        stored.rows += 2 * pushed.rows

    store.set_updater(updater)
    store.init(["t", "u"], [ONES, kv.Table(dim=1, admit=kv.MinCount(2))])
    store.push("t", [grads([5, 5]), grads([1])])
    assert seen == [("t", [1, 5], [[1.0] * WIDTH] * 2)]
    assert firsts(store, [0, 1, 5]) == [1, 3, 5]
    for _ in range(3):
        store.push("u", grads([2**50], 1.0, 1))
    assert firsts(store, [2**50], "u") == [4]
