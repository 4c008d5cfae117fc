"""Bad calls about tables, in every store: errors name key, position and worker; nothing has been sent or counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
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
    jobs,
    run,
    settle,
)
from small_jobs import SOON
from store_kinds import Jobs, Kind, Run

import kvstore as kv
from kvstore.client import DistStore
from kvstore.rule import Rule
from kvstore.ticket import WaitLimits

__all__ = ["jobs", "run"]


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
def test_pushes_that_are_refused_are_no_pushes(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
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

    run(work)


@every
def test_row_ids_and_outs_that_are_refused(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
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

    run(work)


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
def test_tables_that_cannot_be_made(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        for bad, text in (
            (kv.RowSparse([0], ROW), "no shape"),
            (torch.eye(3).to_sparse(), "2 sparse"),
            (kv.RowSparse([0], ROW.half(), (ROWS, WIDTH)), "float16"),
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

    run(work)


@each_of([LOCAL, SYNC])
def test_tables_after_an_optimizer_that_has_no_rule_for_rows(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        store.set_optimizer("lamb")
        with pytest.raises(kv.UsageError, match=r"lamb.*sgd"):
            store.init(["w", "t"], [torch.ones(2), ONES])
        store.init("w", torch.ones(2))  # which the call that failed has not done

    run(work)


def test_delay_compensation_is_for_arrays(jobs: Jobs) -> None:
    def work(session: Any) -> None:
        with DistStore(session, "dist_async", Rule("async", compensation=0.5)) as store:
            store.set_optimizer("sgd")
            with pytest.raises(kv.UsageError, match="delay_compensation"):
                store.init("t", ONES)
            store.init("w", torch.ones(2))

    jobs.job(ASYNC).run_sessions(work)


@each_of([SYNC])
def test_who_is_waited_for_is_named(run: Run) -> None:
    def work(store: DistStore) -> None:
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

    run(work)


@each_of([ASYNC], [SSP])
def test_pushes_that_are_updates_need_an_optimizer(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
        store.init("t", ONES)
        with pytest.raises(kv.UsageError, match="set_optimizer"):
            store.push("t", grads([0]))

    run(work)


@every
def test_a_closed_store_has_no_rows(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
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

    run(work)


@each_of([LOCAL, Kind("device")])
def test_an_updater_of_ones_own_gets_the_rows_that_are_pushed(run: Run) -> None:
    def work(store: kv.KVStore) -> None:
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

    run(work)
