"""Readers of jobs in one process: what they get, and what they may ask for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reading_job import job_with_readers, reader_of
from threaded import ThreadedJob

from kvstore.client import DistStore
from kvstore.errors import DeadlineExceeded, KeyNotInitialized, Mismatch, UsageError
from kvstore.member.session import Session
from kvstore.rows.row_sparse import RowSparse
from kvstore.spec import Spec
from kvstore.store.maker import GROUP, UNNAMED, made_by
from kvstore.table import Capacity, Table

CUT = 3000  # elements: more than the bound of these jobs, so each server has a part


@pytest.fixture
def job() -> Iterator[ThreadedJob]:
    with job_with_readers() as job:
        yield job


def init(store: DistStore) -> None:
    store.set_optimizer("sgd", learning_rate=1.0)
    store.init(["w", "b", "n"], [torch.zeros(CUT), torch.zeros(3), torch.arange(4)])


def step(store: DistStore) -> None:
    store.pushpull(["w", "b"], [-torch.ones(CUT), -torch.ones(3)], out=[torch.empty(CUT), torch.empty(3)])


def test_a_reader_sees_each_round(job: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        init(store)
        with reader_of(job) as reader:
            assert reader.keys() == ["w", "b", "n"]
            assert reader.spec("b") == Spec((3,), "float32")
            for rounds in range(3):
                w, b = reader.pull(["w", "b"])
                assert (w.tolist(), b.tolist()) == ([rounds] * CUT, [rounds] * 3)
                assert reader.rounds("w") == (rounds, rounds)
                step(store)
            assert reader.pull("n").tolist() == [0, 1, 2, 3]

    job.run(work)


def test_stores_that_the_program_has_not_made_take_no_number(tmp_path: Path) -> None:
    with job_with_readers(checkpoint_dir=str(tmp_path)) as job:

        def work(session: Session) -> None:
            with made_by("workers.init()", GROUP):
                group = DistStore(session)
            first = DistStore(session)
            beside = first.companion()
            with made_by("Trainer"):
                second = DistStore(session)
            with made_by("Reducer", UNNAMED):
                sums = DistStore(session)
            for number, store in enumerate((group, first, beside, second, sums)):
                store.init("w", torch.tensor([number]))
            for name, number in {"workers": 0, "1": 1, "2": 3}.items():
                with reader_of(job, store=name) as reader:
                    assert reader.pull("w").tolist() == [number]
            with (
                reader_of(job, store="3", timeout=1.0) as reader,
                pytest.raises(DeadlineExceeded, match="stores workers, 1, 2 have key 'w'"),
            ):
                reader.wait_for("w")

        job.run_sessions(work)


def test_what_is_fresh_enough_comes_from_the_reader(job: ThreadedJob) -> None:
    def work(store: DistStore) -> list[float]:
        init(store)
        seen = []
        with reader_of(job, max_staleness=1) as reader:
            for _ in range(4):
                seen.append(float(reader.pull("w")[0]))
                step(store)
            seen.append(float(reader.pull("w", max_staleness=0)[0]))
        return seen

    assert job.run(work)[0] == [0, 0, 2, 2, 4]


def test_values_go_into_arrays_of_any_kind(job: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        init(store)
        step(store)
        strided = torch.zeros(3, 2)[:, 0]
        plain = np.zeros(CUT, np.float32)
        with reader_of(job) as reader:
            reader.pull("b", strided)
            reader.pull(["w"], [plain])
            with pytest.raises(Mismatch, match=r"key 'b' is float32\[3\], but out is float32\[4\]"):
                reader.pull("b", torch.zeros(4))
            with pytest.raises(UsageError, match="2 keys and 1 arrays"):
                reader.pull(["w", "b"], [plain])
        assert (strided.tolist(), plain.sum()) == ([1, 1, 1], CUT)

    job.run(work)


def test_what_is_returned_is_the_callers_own(job: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        init(store)
        with reader_of(job) as reader:
            reader.pull("b").fill_(9)
            assert reader.pull("b").tolist() == [0, 0, 0]

    job.run(work)


def test_keys_that_are_not_there_yet(job: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        with reader_of(job, timeout=30) as reader:
            init(store)
            reader.wait_for(["w", "b"])
            with pytest.raises(KeyNotInitialized, match="'x' has no value in this job yet; no worker has"):
                reader.pull("x")
            with pytest.raises(DeadlineExceeded, match="'x'"):
                reader.wait_for("x", timeout=0)
        with reader_of(job, store=2) as other, pytest.raises(KeyNotInitialized, match=r"no store 2.*; store 1 has"):
            other.pull("w")

    job.run(work)


def test_in_an_async_store_a_reader_is_current_too() -> None:
    with job_with_readers(workers=2) as job:

        def work(store: DistStore) -> None:
            init(store)
            if store.rank == 0:
                with reader_of(job) as reader:
                    for pushes in range(3):
                        assert reader.pull("b").tolist() == [pushes] * 3
                        store.push("b", -torch.ones(3)).wait()
            store.barrier()

        job.run(work, mode="async")


def test_a_job_without_readers_refuses_them() -> None:
    with job_with_readers(readers=0) as job, pytest.raises(UsageError, match="reader"), reader_of(job):
        pass


def test_no_more_readers_than_there_may_be() -> None:
    with (
        job_with_readers(readers=1) as job,
        reader_of(job),
        pytest.raises(UsageError, match="its 1 readers already"),
        reader_of(job),
    ):
        pass


@pytest.mark.parametrize("call", [lambda reader: reader.pull("w"), lambda reader: reader.keys()])
def test_a_closed_reader_says_so(call: Any) -> None:
    with job_with_readers() as job:
        with reader_of(job) as reader:
            pass
        reader.close()
        with pytest.raises(UsageError, match="closed"):
            call(reader)


def test_what_was_not_pulled_has_no_rounds() -> None:
    with job_with_readers() as job, reader_of(job) as reader, pytest.raises(UsageError, match="has not been pulled"):
        reader.rounds("w")


@pytest.mark.parametrize("wrong", [-1, 0.5, True])
def test_a_staleness_is_a_number_of_rounds(wrong: Any) -> None:
    with job_with_readers() as job, reader_of(job) as reader, pytest.raises(UsageError, match="number of rounds"):
        reader.pull("w", max_staleness=wrong)


def init_tables(store: DistStore) -> None:
    store.init("fixed", Table(shape=(10, 2), init="constant", scale=1.0))
    store.init("grows", Table(dim=2))
    store.init("b", torch.zeros(3))


def push_row(store: DistStore, key: str, number: int, value: float) -> None:
    store.push(key, RowSparse([number], torch.full((1, 2), value))).wait()


def test_rows_are_read_by_their_ids(job: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        init_tables(store)
        push_row(store, "fixed", 3, 7.0)
        push_row(store, "grows", 10**15, 5.0)
        with reader_of(job) as reader:
            assert (reader.spec("fixed"), reader.spec("grows")) == (Table(shape=(10, 2), init="constant"), Table(dim=2))
            fixed, grows = reader.row_sparse_pull(
                ["fixed", "grows"], row_ids=[torch.tensor([[3, 2], [2, 3]]), [10**15, -4]]
            )
            assert fixed[..., 0].tolist() == [[7, 1], [1, 7]]
            assert grows.tolist() == [[5, 5], [0, 0]]
            out = RowSparse([], torch.empty(0, 2))
            reader.row_sparse_pull("fixed", out, [3, 2, 3])
            assert (out.ids.tolist(), out.rows.tolist()) == ([2, 3], [[1, 1], [7, 7]])

    job.run(work)


def test_rows_may_be_old_if_that_is_allowed(job: ThreadedJob) -> None:
    def work(store: DistStore) -> list[float]:
        init_tables(store)
        seen = []
        with reader_of(job, max_staleness=1) as reader:
            for rounds in range(1, 5):
                push_row(store, "grows", 8, float(rounds))
                seen.append(float(reader.row_sparse_pull("grows", row_ids=[8, 9])[0, 0]))
            seen.append(float(reader.row_sparse_pull("grows", row_ids=[8], max_staleness=0)[0, 0]))
        return seen

    assert job.run(work)[0] == [1, 1, 3, 3, 4]


def test_a_parameter_whose_rows_a_table_has_by_now_is_read_from_there() -> None:
    with job_with_readers(readers=2) as job:

        def work(store: DistStore) -> None:
            store.init(["w", "b"], [torch.ones(10, 2), torch.zeros(3)])
            with reader_of(job) as early, reader_of(job) as late:
                assert early.pull("w").sum() == 20
                store.init("w/rows", Table(shape=(10, 2), init="constant", parameter="w"))
                push_row(store, "w/rows", 3, 7.0)
                for reader in (early, late):
                    whole, other = reader.pull(["w", "b"])
                    assert whole[:, 0].tolist() == [1, 1, 1, 7, 1, 1, 1, 1, 1, 1]
                    assert other.tolist() == [0, 0, 0]
                    assert torch.equal(reader.pull("w", torch.zeros(10, 2)), whole)
                    assert reader.row_sparse_pull("w", row_ids=[3]).tolist() == [[7, 7]]
                    assert reader.keys() == ["w", "b"]

        job.run(work)


def test_arrays_and_tables_are_told_apart(job: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        init_tables(store)
        with reader_of(job) as reader:
            with pytest.raises(UsageError, match="read its rows with row_sparse_pull"):
                reader.pull("fixed")
            with pytest.raises(UsageError, match="not a table; pull it"):
                reader.row_sparse_pull("b", row_ids=[0])
            with pytest.raises(UsageError, match="row_ids is missing"):
                reader.row_sparse_pull("fixed")
            with pytest.raises(UsageError, match="10"):
                reader.row_sparse_pull("fixed", row_ids=[10])
            with pytest.raises(UsageError, match="2 keys, 1 row_ids"):
                reader.row_sparse_pull(["fixed", "grows"], row_ids=[[1]])

    job.run(work)


def test_what_a_reader_holds_is_no_older_than_it_says_when_versions_come_again(
    job: ThreadedJob, tmp_path: Path
) -> None:
    def work(store: DistStore) -> None:
        store.init("t", Table(dim=2, evict=Capacity(2)))

        def push(times: int, value: float) -> None:
            for _ in range(times):
                store.push("t", RowSparse([0, 1], torch.full((2, 2), value)), wait=True)

        def read(max_staleness: int) -> list[float]:
            return reader.row_sparse_pull("t", row_ids=[0, 1], max_staleness=max_staleness)[:, 0].tolist()

        push(2, 1.0)
        store.save_table("t", tmp_path)
        push(3, 2.0)
        with reader_of(job) as reader:
            assert read(3) == [2, 2]
            store.load_table("t", tmp_path)
            push(4, 3.0)  # one past the version that the reader holds
            assert read(3) == [3, 3]
            store.put_rows("t", RowSparse([0, 1, 2, 3, 4, 5], torch.full((6, 2), 4.0)))
            assert read(3) == [4, 4]
            store.evict("t")
            assert read(3) == store.row_sparse_pull("t", row_ids=[0, 1])[:, 0].tolist()

    job.run(work)
