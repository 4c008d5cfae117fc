"""Followers of jobs in this process: what the program's arrays become, and what is refused."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reading_job import job_with_readers, reader_of
from waiting import LONG

import kvstore as kv
import workers
from kvstore.client import DistStore
from kvstore.codecs.changes import checksum, encode_changes
from kvstore.errors import DeadlineExceeded, KeyNotInitialized, Mismatch, UsageError, WireError
from kvstore.member.session import Session
from kvstore.reading.held import ReadSegment
from kvstore.reading.published_copy import CopyMemory, Published, PublishedCopy
from kvstore.rows.row_sparse import RowSparse
from kvstore.rule import Rule
from kvstore.table import Capacity, Table
from kvstore.wire import VersionRead

SIZE = 3000  # elements, so that each server has a part


def bytes_of(values: torch.Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()


def test_arrays_become_each_version_whole() -> None:
    changed: list[list[str]] = []

    def work(store: DistStore) -> None:
        store.set_optimizer("sgd", learning_rate=0.5)
        store.init(["w", "b", "later"], [torch.randn(SIZE), torch.zeros(4, 2), torch.zeros(3)])
        sparse = torch.zeros(SIZE)
        sparse[::50] = 1.0
        if store.rank:
            for _ in range(4):
                store.pushpull(["w", "b"], [sparse, torch.ones(4, 2)])
                store.publish(["w", "b"], dtype="bfloat16")
            return
        half, full = torch.zeros(SIZE, dtype=torch.bfloat16), torch.zeros(SIZE)
        strided, wide = torch.zeros(2, 4).t(), np.zeros((4, 2), np.float64)
        with reader_of(job) as reader:
            model = reader.follow({"module.w": half, "b": strided}, {"module.w": "w"}, on_update=changed.append)
            converted = reader.follow({"w": full})
            again = reader.follow({"b": wide, "later": torch.ones(3)}, strict=False)
            assert not model.update()
            with pytest.raises(DeadlineExceeded, match="no version after 0"):
                model.wait_newer(0.3)
            for step in range(4):
                w, b = torch.empty(SIZE), torch.empty(4, 2)
                store.pushpull(["w", "b"], [sparse, torch.ones(4, 2)], out=[w, b])
                number = store.publish(["w", "b"], label=f"step {step}", dtype=torch.bfloat16)
                assert (model.wait_newer(), model.version, model.label) == (number, number, f"step {step}")
                assert bytes_of(half) == bytes_of(w.to(torch.bfloat16))
                assert converted.update()
                assert torch.equal(full, half.float())
                assert torch.equal(strided, b.to(torch.bfloat16).float())
                assert step % 2 or again.update()  # it leaves versions out
            assert wide.tolist() == (b + 1.0).to(torch.bfloat16).tolist()
            assert not model.update()
            assert changed == [["module.w", "b"]] * 4
            with pytest.raises(KeyNotInitialized, match="'later' is not published"):
                reader.follow({"w": half, "later": torch.zeros(3)}).update()
            with pytest.raises(KeyNotInitialized, match="'bias' is not published"):
                reader.follow({"bias": half}, strict=True, names={}).wait_newer(5.0)
            with pytest.raises(Mismatch, match=r"shape \(3,\), and key 'w' has \(3000,\)"):
                reader.follow({"w": torch.zeros(3)}).update()

    with job_with_readers(workers=2) as job:
        job.run(work)


def test_a_follower_may_be_there_before_the_store_and_its_keys() -> None:
    def work(session: Session) -> None:
        with reader_of(job) as reader:
            model = reader.follow({"w": torch.zeros(3)})
            assert not model.update()
            store = DistStore(session)
            assert not model.update()
            store.init("w", torch.ones(3))
            assert not model.update()
            assert store.publish() == model.wait_newer() == 1

    with job_with_readers(workers=1) as job:
        job.run_sessions(work)


def test_empty_arrays_have_versions_too() -> None:
    def work(store: DistStore) -> None:
        store.init(["none", "w"], [torch.zeros(0, 3), torch.zeros(3)])
        with reader_of(job) as reader:
            model = reader.follow({"none": torch.zeros(0, 3)})
            assert not model.update()
            for number in (1, 2):
                assert store.publish(label=f"{number}") == model.wait_newer() == number
                assert (model.version, model.label, model.update()) == (number, f"{number}", False)
            with pytest.raises(DeadlineExceeded, match="no version after 2"):
                model.wait_newer(0.3)

    with job_with_readers(workers=1) as job:
        job.run(work)


def test_versions_of_a_store_whose_every_push_is_an_update() -> None:
    def work(store: DistStore) -> None:
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init("w", torch.zeros(SIZE))
        if store.rank:
            return
        out = torch.ones(SIZE)
        with reader_of(job) as reader:
            model = reader.follow({"w": out})
            for number in (1, 2):
                store.push("w", -torch.ones(SIZE))
                assert store.publish() == model.wait_newer() == number
                assert out.tolist() == [number] * SIZE

    with job_with_readers(workers=2) as job:
        job.run(work, mode="async")


KINDS: dict[str, tuple[Rule, dict[str, int]]] = {
    "a quorum": (Rule(quorum=2), {}),
    "a quorum that keeps what is late": (Rule(quorum=2, late="keep"), {}),
    "a quorum of hosts": (Rule(quorum=2), {"aggregators": 2}),
    "rounds, summed by host": (Rule(), {"aggregators": 2}),
    "asynchronous": (Rule("async"), {}),
    "asynchronous, summed by host": (Rule("async", aggregate="host"), {"aggregators": 2}),
    "bounded staleness": (Rule("async", staleness=2), {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_versions_are_whole_and_rise_in_every_kind_of_store(kind: str) -> None:
    rule, more = KINDS[kind]

    def work(store: DistStore) -> None:
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init("w", torch.zeros(SIZE))
        out = torch.zeros(SIZE)
        with reader_of(job) as reader:
            model = reader.follow({"w": out})
            before = torch.zeros(SIZE)
            for step in range(6):
                pushed = store.push("w", -torch.ones(SIZE))
                if store.rank == 0:
                    assert store.publish(label=f"{step}") == model.wait_newer()
                    assert (out.diff() != 0).sum() <= 1  # each server's part is of one update
                    assert (out >= before).all()
                    before = out.clone()
            pushed.wait()
            store.barrier()
            if store.rank == 0:
                store.pull("w", before)
                number = store.publish(label="last")
                assert (number, model.wait_newer(), model.label) == (7, 7, "last")
                assert torch.equal(out, before)
            store.barrier()

    with job_with_readers(workers=4, **more) as job:
        job.run(work, rule=rule)


def test_a_version_waits_for_the_round_of_a_quorum_and_a_follower_says_so() -> None:
    pushed = threading.Event()

    def work(store: DistStore) -> None:
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init("w", torch.zeros(SIZE))
        if store.rank:
            assert store.rank == 2 or pushed.wait(LONG)
            return store.push("w", -torch.ones(SIZE)) if store.rank == 1 else None
        out = torch.zeros(SIZE)
        with reader_of(job) as reader:
            model = reader.follow({"w": out})
            store.push("w", -torch.ones(SIZE))
            assert store.publish() == 1
            # On a busy machine even the servers' answers take longer.
            with pytest.raises(DeadlineExceeded, match=r"its round is not over|is not done in time"):
                model.wait_newer(0.2)
            pushed.set()
            assert (model.wait_newer(), out[0]) == (1, 3.0)  # the round counts as if all three had pushed
        return None

    with job_with_readers(workers=3) as job:
        job.run(work, rule=Rule(quorum=2))


def test_versions_while_rows_are_evicted_and_checkpoints_are_made_of_compressed_pushes(tmp_path: Path) -> None:
    def work(store: DistStore) -> None:
        store.set_gradient_compression({"type": "2bit", "threshold": 1.0})
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init(["w", "t"], [torch.zeros(SIZE), Table(dim=2, evict=Capacity(4))])
        out = torch.zeros(SIZE)
        with reader_of(job) as reader:
            model = reader.follow({"w": out, "t": torch.zeros(4, 2)}, strict=False)
            for step in range(1, 5):
                ids = torch.arange(8) + step
                store.pushpull("t", RowSparse(ids, torch.ones(8, 2)), row_ids=ids)
                store.pushpull("w", -torch.ones(SIZE))
                saved = store.save_checkpoint()
                store.evict("t")
                number = store.publish()
                assert (saved, number) == (step, step)
                if store.rank == 0:
                    assert (model.wait_newer(), out.unique().tolist()) == (step, [2.0 * step])
            store.barrier()
            assert store.statistics().failed_checkpoints == 0

    with job_with_readers(workers=2, checkpoint_dir=str(tmp_path)) as job:
        job.run(work)


def test_the_global_weights_of_diloco_are_published() -> None:
    def work(store: DistStore) -> None:
        module, follows = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        torch.nn.init.constant_(module.weight, float(store.rank))
        inner = torch.optim.SGD(module.parameters(), 0.1)
        outer = workers.DiLoCo(module, inner, store, inner_steps=2)
        with reader_of(job) as reader:
            model = reader.follow(follows.state_dict())
            for step in range(1, 6):
                inner.zero_grad()
                module(torch.ones(1, 3) * (1 + store.rank)).sum().backward()
                inner.step()
                if step % 2:  # what is local now is not the global weights
                    assert store.publish() == step // 2 + 1
                    with outer.global_weights():
                        wanted = [value.clone() for value in module.state_dict().values()]
                    if store.rank == 0:
                        model.wait_newer()
                        assert all(map(torch.equal, follows.state_dict().values(), wanted))
                        assert not torch.equal(follows.weight, module.weight)

    with job_with_readers(workers=2) as job:
        job.run(work)


def test_a_job_publishes_every_few_rounds_and_the_rest_at_its_end() -> None:
    over = threading.Barrier(2)

    def work(store: DistStore) -> None:
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init("w", torch.zeros(SIZE))
        out = np.zeros(SIZE, np.float32)
        with reader_of(job) as reader:
            model = reader.follow({"w": out})
            for rounds, end, number in ((5, store.report, 2), (1, store.barrier, 3), (1, store.barrier, 3)):
                for _ in range(rounds):
                    store.pushpull("w", -torch.ones(SIZE))
                end()
                if store.rank == 0:
                    model.update()
                    assert (model.version, model.label, out[0]) == (number, f"round {2 * number}", 4 * number)
            if store.rank == 0:
                store.close()
                assert (model.wait_newer(), model.label, out[0]) == (4, "round 7", 14.0)
            over.wait()

    with job_with_readers(workers=2, publish_every=2) as job:
        job.run(work)


def test_a_state_is_published_by_worker_0_alone() -> None:
    def work(store: DistStore) -> None:
        module = torch.nn.Sequential(torch.nn.Linear(70, 50), torch.nn.BatchNorm1d(50))
        if store.rank:  # its own values do not count
            assert store.publish_state({"other": torch.zeros(1)}) == 1
            return
        follows = torch.nn.Sequential(torch.nn.Linear(70, 50), torch.nn.BatchNorm1d(50))
        with reader_of(job) as reader:
            model = reader.follow(follows.state_dict())
            for number in (1, 2, 3):
                assert store.publish_state(module.state_dict()) == model.wait_newer() == number
                for mine, theirs in zip(follows.state_dict().values(), module.state_dict().values(), strict=True):
                    assert torch.equal(mine, theirs)
                with torch.no_grad():
                    module[0].weight[3] += 1
                    module[1].num_batches_tracked += 1
        with pytest.raises(UsageError, match=r"lacks '0\.bias'"):
            store.publish_state({name: each for name, each in module.state_dict().items() if name != "0.bias"})
        with pytest.raises(UsageError, match="is published as float32"):
            store.publish(["0.bias"], dtype=torch.bfloat16)

    with job_with_readers(workers=2) as job:
        job.run(work)


def test_what_is_refused_ends_nothing() -> None:
    def work(store: DistStore) -> None:
        store.init(["f", "i", "j"], [torch.zeros(3), torch.arange(SIZE), torch.arange(SIZE)])
        assert store.publish() == 1
        with pytest.raises(UsageError, match="'f' is published as float32, and cannot be published as bfloat16"):
            store.publish(dtype=torch.bfloat16)
        with pytest.raises(KeyNotInitialized, match="'nope' has no value"):
            store.publish({"f", "nope"})
        with pytest.raises(UsageError, match="must be a text"):
            store.publish(label="\ud800")
        with pytest.raises(UsageError, match=r"'mask' cannot be published, .*: dtype torch.bool"):
            store.publish_state({"mask": torch.ones(3, dtype=torch.bool)})
        with pytest.raises(UsageError, match="arrays by name, not a list"):
            store.publish_state([1])  # type: ignore[arg-type]
        assert store.publish() == 2
        with torch.inference_mode():
            inference = torch.zeros(3)
        with reader_of(job) as reader:
            mask, f = torch.zeros(3, dtype=torch.bool), torch.ones(3)
            model = reader.follow({"f": f, "mask": mask}, strict=False)
            assert model.wait_newer() == 2
            assert f.tolist() == [0.0] * 3
            with pytest.raises(UsageError, match=r"'mask' cannot follow: dtype torch\.bool"):
                reader.follow({"f": f, "mask": mask})
            with pytest.raises(UsageError, match="'f' cannot follow: a tensor that was made in inference mode"):
                reader.follow({"f": inference}, strict=False).update()
            with pytest.raises(UsageError, match="names has 'g', which state_dict lacks"):
                reader.follow({"f": f}, {"g": "f"})
            with pytest.raises(UsageError, match="no arrays"):
                reader.follow({})

    with job_with_readers(workers=1) as job:
        job.run(work)


def copy_of() -> PublishedCopy:
    arrays = {"w": Published(4, "float32", [ReadSegment(7, 0, 0, 4)])}
    return PublishedCopy(arrays, CopyMemory(arrays))


def answer(**other: Any) -> VersionRead:
    fields: dict[str, Any] = {"lineage": 1 << 60, "number": 3, "label": "", "dtypes": ["float32"], "sums": [1]}
    return VersionRead(1, **{**fields, "counts": [0], "lengths": [], **other})


@pytest.mark.parametrize(
    "other",
    [
        {},  # nothing has changed since nothing
        {"counts": [1], "lengths": [16], "buffers": [bytes(16)]},  # no encoding
        {"counts": [1], "lengths": [99], "buffers": [bytes(16)]},
        {"counts": [2], "lengths": [12, 4], "buffers": [bytes(8), bytes(8)]},  # a part in two buffers
        {"dtypes": ["float32"] * 2, "sums": [1, 1], "counts": [0, 0]},  # more than was asked for
    ],
    ids=["nothing", "no encoding", "lengths", "two buffers", "too many"],
)
def test_an_answer_that_cannot_be_is_refused_and_the_piece_counts_as_not_there(other: dict[str, Any]) -> None:
    copy = copy_of()
    copy.note(1 << 60, 3, "")
    (ask,) = copy.asks()
    with pytest.raises(WireError):
        copy.take(ask, answer(**other))
    assert copy.memory.held["w"].tolist() == [0]
    assert list(copy.asks()) == [ask]


def test_changes_that_do_not_make_what_was_published_are_refused_and_all_of_the_piece_is_fetched() -> None:
    values = np.arange(64, dtype=np.uint32)
    arrays = {"w": Published(64, "float32", [ReadSegment(7, 0, 0, 64)])}
    copy = PublishedCopy(arrays, CopyMemory(arrays))

    def take(number: int, positions: Any, told: int) -> bool:
        copy.note(1 << 60, number, "")
        (ask,) = copy.asks()
        parts = [bytes(part) for part in encode_changes(positions, values)]
        lengths = [len(part) for part in parts]
        fields = {"counts": [len(parts)], "lengths": lengths, "buffers": parts, "sums": [told], "number": number}
        return copy.take(ask, answer(**fields))

    assert take(3, None, checksum(values))
    values[5] += 1
    assert take(4, np.array([5]), checksum(values))
    assert copy.memory.held["w"].tolist() == [4]
    values[[5, 9]] += 1
    with pytest.raises(WireError, match="elements 0 to 64 of key 'w' are not those of version 5"):
        take(5, np.array([5]), checksum(values))  # one of the changes is not there
    assert copy.memory.held["w"].tolist() == [0]
    assert take(5, None, checksum(values))
    assert copy.arrays["w"].flat.view(torch.int32).tolist() == values.tolist()


# ---- rows of tables

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


@pytest.mark.parametrize("strict", [True, False])
def test_an_array_whose_server_makes_the_first_version_later_than_another_is_not_left_out(strict: bool) -> None:
    looked = threading.Event()

    def work(store: DistStore) -> None:
        store.init(["a", "b"], [torch.zeros(9), torch.zeros(9)])  # each on a server of its own
        store.push("a", torch.ones(9))
        if store.rank:
            looked.wait()
            store.push("b", torch.ones(9))
            return
        store.push("b", torch.ones(9))
        store.pull("a", torch.zeros(9))
        store.publish()  # one server has it now, the other when worker 1 has pushed
        with reader_of(job) as reader:
            a, b = torch.zeros(9), torch.zeros(9)
            model = reader.follow({"a": a, "b": b}, strict=strict)
            try:
                assert not model.update()
            finally:
                looked.set()
            assert model.wait_newer() == 1
            assert torch.equal(b, torch.full((9,), 2.0))

    with job_with_readers(workers=2) as job:
        job.run(work)


def test_a_parameter_that_becomes_a_table_is_not_left_as_it_was_without_a_word() -> None:
    def work(store: DistStore) -> None:
        store.init(["w", "b"], [torch.ones(10, 2), torch.zeros(3)])
        w, b = torch.zeros(10, 2), torch.zeros(3)
        with reader_of(job) as reader:
            strict, loose = reader.follow({"w": w, "b": b}), reader.follow({"w": w.clone(), "b": b}, strict=False)
            early = reader.follow({"w": w})
            assert not early.update()  # it knows the key as an array
            store.publish()
            for each in (strict, loose):
                assert each.update()
            store.init("w/rows", Table(shape=(10, 2), parameter="w"))
            store.push("w/rows", RowSparse([3], torch.full((1, 2), 7.0)))
            store.pushpull("b", torch.full((3,), 5.0))
            assert store.publish() == 2
            for each in (strict, early):
                for _ in range(2):
                    with pytest.raises(KeyNotInitialized, match=r"key 'w' is a table. .* reader.open_table\('w'\)"):
                        each.update()
            assert strict.version == 1
            assert loose.update()
            assert b.tolist() == [5, 5, 5]
            assert reader.open_table("w").lookup([3]).tolist() == [[7, 7]]

    with job_with_readers() as job:
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
