"""Tables that readers of jobs in this process open, and what is refused."""

from __future__ import annotations

import threading

import pytest
import torch
from reading_job import job_with_readers, reader_of

import kvstore as kv
from kvstore.client import DistStore
from kvstore.errors import DeadlineExceeded, KeyNotInitialized, UsageError

IDS = torch.tensor([[3, 9], [-5, 1 << 60]])


def test_the_rows_of_tables_become_each_version_whole() -> None:
    over = threading.Barrier(2)

    def work(store: DistStore) -> None:
        store.set_optimizer("adagrad", learning_rate=0.5)
        growing = kv.Table(dim=4, init="normal", evict=kv.Unseen(2), dtype=torch.bfloat16)
        alike = kv.Table(shape=(50, 4), init="uniform")
        store.init(["w", "user", "item", "more"], [torch.zeros(9), growing, alike, alike])

        def push(ids: list[int]) -> None:
            rows = torch.ones(len(ids), 4)
            store.push(["item", "more"], [kv.RowSparse(torch.tensor(ids) % 50, rows)] * 2)  # together, as a group
            store.push("user", kv.RowSparse(torch.tensor(ids), rows.bfloat16()))
            store.push("w", torch.ones(9))

        def pulled(key: str, ids: torch.Tensor) -> torch.Tensor:
            rows: torch.Tensor = store.row_sparse_pull(key, row_ids=ids)
            return rows

        push([3, -5])
        store.publish(label="one", dtype=torch.bfloat16)
        if store.rank:
            for ids in ([3], [3, 1 << 60], [7]):
                push(ids)
                store.publish()
                over.wait()
            return
        with reader_of(job) as reader:
            user, item = reader.open_table("user"), reader.open_table("item")
            assert (user.version, user.label, user.changed, len(user)) == (1, "one", None, 2)
            every = torch.arange(50)
            assert torch.equal(item.lookup(every), pulled("item", every))
            assert torch.equal(user.lookup(IDS), pulled("user", IDS))
            assert user.has(IDS).tolist() == [[True, False], [True, False]]
            assert not user.update()
            with pytest.raises(DeadlineExceeded, match="no version of table 'user' after 1"):
                user.wait_newer(0.3)
            before = user.lookup(IDS)
            for number, ids in enumerate(([3], [3, 1 << 60], [7]), 2):
                push(ids)
                store.row_sparse_pull("user", row_ids=[3])  # the round is over
                assert torch.equal(user.lookup(IDS), before)
                store.publish()
                assert user.wait_newer() == item.wait_newer() == number
                assert torch.equal(user.lookup(IDS), pulled("user", IDS))
                assert torch.equal(item.lookup(every), pulled("item", every))
                assert item.changed is not None
                assert set(item.changed.tolist()) == {each % 50 for each in ids}
                before = user.lookup(IDS)
                over.wait()
            assert user.has([-5, 3, 7]).tolist() == [False, True, True]  # one has gone
            assert user.changed is not None
            assert set(user.changed.tolist()) == {-5, 7}
            assert repr(user) == "<FollowedTable 'user' of bfloat16[*, 4], version 4>"
            with pytest.raises(UsageError, match="the ids 0 to 49"):
                item.lookup([50])
            with pytest.raises(UsageError, match="not a table; follow it"):
                reader.open_table("w")
            store.init("late", kv.Table(shape=(5, 2)))
            with pytest.raises(DeadlineExceeded, match="no version of table 'late'"):
                reader.open_table("late", timeout=0.3)

    with job_with_readers(workers=2) as job:
        job.run(work)


def test_versions_of_tables_alone_where_every_push_is_an_update() -> None:
    def work(store: DistStore) -> None:
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init("rows", kv.Table(shape=(10, 2)))
        if store.rank:
            return
        with reader_of(job) as reader:
            for number in (1, 2):
                store.push("rows", kv.RowSparse(torch.arange(10), -torch.ones(10, 2)))
                assert store.publish() == number
                table = reader.open_table("rows")
                assert table.lookup(list(range(10))).tolist() == [[number] * 2] * 10
            store.publish("rows")
            assert table.update()
            assert table.changed is not None
            assert not len(table.changed)
            with pytest.raises(KeyNotInitialized):
                store.publish("other")

    with job_with_readers(workers=2) as job:
        job.run(work, mode="async")


def test_who_comes_while_rows_have_changed_since_the_last_version_waits_for_the_next() -> None:
    at = threading.Barrier(2)

    def work(store: DistStore) -> None:
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init("rows", kv.Table(shape=(10, 4)))

        def push(rounds: int) -> None:
            for _ in range(rounds):
                store.push("rows", kv.RowSparse(torch.arange(10), -torch.ones(10, 4)))
            store.row_sparse_pull("rows", row_ids=[1])
            at.wait()

        push(5)
        if store.rank == 0:
            with reader_of(job) as reader:
                with pytest.raises(DeadlineExceeded, match="from the next version on, and the last was 2"):
                    reader.open_table("rows", timeout=0.5)
                at.wait()
                push(2)
                table = reader.open_table("rows")
                assert (table.version, table.label, table.lookup([3]).tolist()) == (3, "round 6", [[12.0] * 4])
            return
        at.wait()
        push(2)

    with job_with_readers(workers=2, publish_every=2) as job:
        job.run(work)
