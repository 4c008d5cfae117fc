"""Tables as a whole, in every store: rows that come and go, statistics, states, and saves of them in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_store import settle
from row_stores import (
    ASYNC,
    HOSTS,
    LOCAL,
    MORE_ROUNDS,
    QUORUM,
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
    updating,
)
from store_kinds import Kind, Run

import kvstore as kv


@updating
def test_rows_are_made_by_the_push_that_is_admitted(store: kv.KVStore) -> None:
    begin(store, kv.Table(dim=WIDTH, init="constant", scale=5.0, admit=kv.MinCount(3)))
    found = []
    for number in range(4):
        store.push("t", grads([2**40, number]))
        found.append(firsts(store, [2**40, 3]))
    assert found == [[0, 0], [0, 0], [5.0 - store.num_workers, 0], [5.0 - 2 * store.num_workers, 0]]
    statistics = store.table_statistics("t")
    assert (statistics["rows"], statistics["made"], statistics["evicted"]) == (1, 1, 0)
    assert statistics["refused"] == 2 + 4


@every
def test_admission_by_chance_is_the_same_everywhere(run: Run) -> None:
    def work(store: kv.KVStore) -> list[float]:
        table = kv.Table(dim=WIDTH, init="constant", scale=9.0, admit=kv.Probability(0.5), seed=3)
        begin(store, table)
        settle(store, store.push("t", grads(torch.arange(40))))
        return firsts(store, torch.arange(40))

    results = run(work)
    assert all(result == results[0] for result in results)
    there = sum(value != 0 for value in results[0])
    assert there >= 8


@updating
def test_rows_that_nobody_has_pushed_for_long_go(store: kv.KVStore) -> None:
    begin(store, kv.Table(dim=WIDTH, init="constant", evict=kv.Unseen(rounds=2)))
    done = store.num_workers
    store.push("t", grads(torch.arange(100, 108)))
    for _ in range(2):
        store.push("t", grads([7]))
    assert firsts(store, [100, 107, 7]) == [1.0 - done, 1.0 - done, 1.0 - 2 * done]
    store.push("t", grads([7, 100]))  # what is pushed in time is kept
    assert firsts(store, [107, 7]) == [1.0, 1.0 - 3 * done]
    store.evict("t")
    statistics = store.table_statistics("t")
    assert statistics["rows"] == statistics["made"] - statistics["evicted"] == 2


@pytest.mark.parametrize("by", ["age", "count"])
@each_of([LOCAL], MORE_ROUNDS[:1], long=MORE_ROUNDS[1:2])
def test_a_full_table_lets_the_oldest_or_the_rarest_go(store: kv.KVStore, by: str) -> None:
    begin(store, kv.Table(dim=WIDTH, init="constant", evict=kv.Capacity(4, by=by)))
    for ids in ([1, 2], [1, 2], [3, 4], [1], [5]):
        store.push("t", grads(ids))
    kept = [value != 1 for value in firsts(store, [1, 2, 3, 4, 5])]
    statistics = store.table_statistics("t")
    assert (statistics["rows"], statistics["made"], statistics["evicted"]) == (4, 5, 1)
    assert (kept[0], kept[1], kept[4]) == (True, by == "count", by == "age") or by == "count"
    assert sum(kept) == 4


@every
def test_statistics_of_a_table(store: kv.KVStore) -> None:
    begin(store, kv.Table(dim=WIDTH))
    settle(store, store.push("t", grads([1, 2, 2**60])))
    statistics = store.table_statistics("t")
    assert set(statistics) >= {"rows", "made", "evicted", "refused", "bytes", "version"}
    assert (statistics["rows"], statistics["made"], statistics["evicted"], statistics["refused"]) == (3, 3, 0, 0)
    assert statistics["bytes"] >= 3 * WIDTH * 4
    assert store.statistics().keys == 1


@every
def test_rows_can_be_replaced_and_read_page_by_page(store: kv.KVStore) -> None:
    begin(store)
    store.init("u", kv.Table(dim=2))
    settle(store, store.push("t", grads([1])))
    if store.rank == 0:
        store.put_rows("t", grads([8, 1], 5.0))
        store.put_rows("u", grads([2**45, -3], 7.0, 2))
    store.barrier()
    assert firsts(store, [0, 1, 8]) == [1, 5, 5]
    pages = list(store.table_rows("u"))
    assert sorted(id for page in pages for id in page.ids.tolist()) == [-3, 2**45]
    assert all(page.rows.unique().tolist() == [7] for page in pages)
    there = {
        id: row[0]
        for page in store.table_rows("t")
        for id, row in zip(page.ids.tolist(), page.rows.tolist(), strict=True)
    }
    assert there[1] == there[8] == 5
    store.barrier()
    for bad, text in ((grads([1, 1]), "comes twice"), (grads([10]), "id 10"), (grads([0], 1.0, 2), r"2\]")):
        with pytest.raises(kv.UsageError, match=text):
            store.put_rows("t", bad)
    settle(store, store.push("t", grads([8])))
    assert firsts(store, [1, 8]) == [5, 5 - store.num_workers]


@pytest.mark.parametrize("grows", [False, True])
@updating
def test_a_run_goes_on_from_saved_states_to_the_bit(run: Run, grows: bool, tmp_path: Path) -> None:
    table = kv.Table(dim=WIDTH, init="normal") if grows else kv.Table(shape=(ROWS, WIDTH), init="normal")

    def step(store: kv.KVStore, number: int) -> None:
        generator = torch.Generator().manual_seed(10 * number + store.rank)
        ids = torch.randint(ROWS, (4,), generator=generator)
        store.push(["t", "w"], [kv.RowSparse(ids, torch.randn(4, WIDTH, generator=generator)), torch.ones(3)])

    def rows(store: kv.KVStore) -> torch.Tensor:
        return store.row_sparse_pull("t", row_ids=torch.arange(ROWS))

    def begun(store: kv.KVStore) -> None:
        store.set_optimizer("adam", learning_rate=0.1)
        store.init(["t", "w"], [table, torch.zeros(3)])

    def whole(store: kv.KVStore) -> Any:
        begun(store)
        step(store, 0)
        step(store, 1)
        out = torch.empty(3)
        store.pull("w", out)
        pages, middle = list(store.table_rows("t")), rows(store)
        if store.rank == 0:
            store.save_optimizer_states(tmp_path / "s")
        store.barrier()
        step(store, 2)
        return pages, middle, rows(store)

    pages, middle, end = run(whole)[0]

    def second(store: kv.KVStore) -> Any:
        begun(store)
        if store.rank == 0:
            for page in pages:
                store.put_rows("t", page)
        store.barrier()
        assert torch.equal(rows(store), middle)
        store.barrier()
        store.load_optimizer_states(tmp_path / "s")
        store.barrier()
        step(store, 2)
        return rows(store)

    assert torch.equal(run(second)[0], end)


@each_of([SYNC], [MORE_ROUNDS[2], HOSTS], long=[QUORUM])
def test_rounds_go_on_without_workers_that_have_run_out(store: kv.KVStore) -> None:
    begin(store)
    for number in range(1 + store.rank):
        store.push("t", grads([number, 9]))
    store.join()
    workers = store.num_workers
    pushed = sum(1 + rank for rank in range(workers))
    assert firsts(store, [0, workers - 1, 9]) == [1.0 - workers, 0.0, 1.0 - pushed]
    settle(store, store.push("t", grads([0])))
    assert firsts(store, [0]) == [1.0 - 2 * workers]


@each_of([ASYNC], long=[SSP])
def test_workers_that_run_out_hold_up_nobody(store: kv.KVStore) -> None:
    begin(store)
    for _ in range(1 + 4 * store.rank):
        store.pushpull("t", grads([store.rank]), row_ids=[9])
    store.join()
    assert firsts(store)[: store.num_workers] == [-4.0 * rank for rank in range(store.num_workers)]


def test_what_is_saved_is_loaded_with_other_numbers_of_servers_and_workers(jobs: Any, tmp_path: Path) -> None:
    tables = [kv.Table(shape=(50, 4), init="normal"), kv.Table(dim=4, init="uniform", evict=kv.Unseen(100))]

    def step(store: kv.KVStore, number: int) -> None:
        if store.rank == 0:
            generator = torch.Generator().manual_seed(number)
            ids = torch.randint(50, (2, 30), generator=generator)
            rows = torch.randn(2, 30, 4, generator=generator)
            store.push(["t", "u"], [kv.RowSparse(*each) for each in zip(ids, rows, strict=True)])
        else:
            store.push(["t", "u"], [kv.RowSparse.zeros((50, 4)), kv.RowSparse.zeros((0, 4))])

    def begun(store: kv.KVStore) -> None:
        store.set_optimizer("adagrad", learning_rate=0.1)
        store.init(["t", "u"], tables)

    def rows(store: kv.KVStore) -> Any:
        return store.row_sparse_pull(["t", "u"], row_ids=[torch.arange(50)] * 2)

    def save(store: kv.KVStore) -> Any:
        begun(store)
        for number in range(4):
            step(store, number)
        if store.rank == 0:
            for key in ("t", "u"):
                store.save_table(key, tmp_path / key)
        store.barrier()
        middle = rows(store)
        if store.rank == 0:
            store.save_optimizer_states(tmp_path / "states")
        store.barrier()
        step(store, 4)
        return middle, rows(store)

    def load(store: kv.KVStore) -> Any:
        begun(store)
        for key in ("t", "u"):
            store.load_table(key, tmp_path / key)
        store.barrier()
        middle = rows(store)
        store.barrier()
        store.load_optimizer_states(tmp_path / "states")  # the same, from another file
        store.barrier()
        step(store, 4)
        return middle, rows(store)

    middle, end = jobs.run(Kind("dist_sync", 2, 2), save)[0]
    for kind in (Kind("local"), Kind("dist_sync", 1, 1), Kind("dist_sync", 3, 2)):
        for again, final in jobs.run(kind, load):
            assert all(torch.equal(*each) for each in zip(again, middle, strict=True))
            assert all(torch.equal(*each) for each in zip(final, end, strict=True))
    looked_up = kv.open_table(tmp_path / "t").lookup(np.arange(50))
    assert torch.equal(torch.as_tensor(np.asarray(looked_up)), middle[0])


GROWING = kv.Table(dim=WIDTH, init="normal", seed=4, evict=kv.Unseen(2))
KEPT = kv.Table(dim=WIDTH, init="normal", seed=4, evict=kv.Unseen(50))
IDS = torch.arange(-20, 60)
every = each_of([*ROUNDS, ASYNC], MORE_ROUNDS[:2], long=[QUORUM])


def push(store: kv.KVStore, first: int, last: int) -> None:
    """All workers push the same ids."""
    settle(store, store.push("t", grads(torch.arange(first, last) * 3)))


@every
def test_a_saved_table_is_served_and_loaded_as_it_was(store: kv.KVStore, tmp_path: Path) -> None:
    store.set_optimizer("adam", learning_rate=0.1)
    store.init("t", KEPT)
    push(store, 0, 10)
    push(store, 5, 15)
    want = store.row_sparse_pull("t", row_ids=IDS)
    if store.rank == 0:
        version = store.save_table("t", tmp_path).wait()
        opened = kv.open_table(tmp_path, verify=True)
        assert opened.version == version > 0
        assert torch.equal(opened.lookup(IDS), want)
        assert len(opened) == store.table_statistics("t")["rows"] == 15
    store.barrier()
    store.init("other", KEPT)
    store.load_table("other", tmp_path)
    store.barrier()
    assert torch.equal(store.row_sparse_pull("other", row_ids=IDS), want)
    store.barrier()
    ids = torch.arange(0, 45, 3)
    settle(store, *(store.push(key, grads(ids)) for key in ("t", "other")))
    one, two = (store.row_sparse_pull(key, row_ids=IDS) for key in ("t", "other"))
    assert torch.equal(one, two)  # states and counts of updates were loaded, too
    assert not torch.equal(one, want)


@every
def test_what_has_changed_since_is_saved_and_what_has_gone_is_not_served(store: kv.KVStore, tmp_path: Path) -> None:
    begin(store, GROWING)
    push(store, 0, 10)
    since = None
    for number in range(4):
        push(store, 10 + number, 12 + number)
        if store.rank == 0:
            since = store.save_table("t", tmp_path, since=since, wait=False).wait(60)
            opened = kv.open_table(tmp_path)
            assert torch.equal(opened.lookup(IDS), store.row_sparse_pull("t", row_ids=IDS))
            assert len(opened) == store.table_statistics("t")["rows"]
        store.barrier()
    if store.rank == 0:
        assert not opened.has([0, 3]).any()
        with pytest.raises(kv.UsageError, match="no save of version 0"):
            store.save_table("t", tmp_path, since=0)
    store.barrier()


@every
def test_states_of_another_optimizer_are_left_out(store: kv.KVStore, tmp_path: Path) -> None:
    store.set_optimizer("adam", learning_rate=0.1)
    store.init("t", kv.Table(dim=WIDTH))
    push(store, 0, 10)
    if store.rank == 0:
        store.save_table("t", tmp_path)
    store.barrier()
    store.set_optimizer("adagrad", learning_rate=0.1)
    store.init("other", kv.Table(dim=WIDTH))
    store.load_table("other", tmp_path)
    store.barrier()
    assert torch.equal(store.row_sparse_pull("other", row_ids=IDS), kv.open_table(tmp_path).lookup(IDS))
    store.init("wide", kv.Table(dim=WIDTH + 1))
    if store.rank == 0:  # whose directory counts
        with pytest.raises(kv.UsageError, match="key 'wide' is a table"):
            store.load_table("wide", tmp_path)


def test_a_save_that_goes_on_has_the_table_as_it_was(tmp_path: Path) -> None:
    with kv.create("local") as store:
        begin(store, kv.Table(dim=WIDTH))
        push(store, 0, 20)
        want = store.row_sparse_pull("t", row_ids=IDS)
        ticket = store.save_table("t", tmp_path, wait=False)
        for _ in range(5):
            push(store, 0, 25)
        assert ticket.wait(60) == 1
        assert ticket.done()
        assert torch.equal(kv.open_table(tmp_path).lookup(IDS), want)


def test_a_directory_that_cannot_be_written_to_is_an_error_at_once_or_at_the_ticket(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with kv.create("local") as store:
        begin(store, kv.Table(dim=WIDTH))
        with pytest.raises(kv.UsageError, match="'t' cannot be saved there"):
            store.save_table("t", tmp_path / "file")
        ticket = store.save_table("t", tmp_path / "file", wait=False)
        with pytest.raises(kv.UsageError, match="'t' cannot be saved there"):
            ticket.wait(60)
        with pytest.raises(kv.CheckpointError, match="no saved table"):
            store.load_table("t", tmp_path / "none")
        assert store.table_statistics("t")["rows"] == 0
        push(store, 0, 3)
        assert np.isfinite(store.row_sparse_pull("t", row_ids=[0, 3, 6]).numpy()).all()


def test_a_save_is_of_the_rows_whoever_they_belong_to(tmp_path: Path) -> None:
    with kv.create("local") as store:
        store.init("t", kv.Table(shape=(4, 2), parameter="w"))
        store.push("t", kv.RowSparse([1], torch.ones(1, 2), (4, 2)))
        since = store.save_table("t", tmp_path).wait()
        store.push("t", kv.RowSparse([3], torch.ones(1, 2), (4, 2)))
        store.save_table("t", tmp_path, since=since)
        store.init("other", kv.Table(shape=(4, 2)))
        store.load_table("other", tmp_path)
        assert store.row_sparse_pull("other", row_ids=[0, 1, 2, 3])[:, 0].tolist() == [0, 1, 0, 1]


@every
def test_a_delta_is_of_the_course_that_it_continues(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Versions come again after each of these, and some change rows that no version counts."""

    def load(store: kv.KVStore) -> None:
        store.load_table("t", tmp_path / "table" / "save-00000001")

    def other_rule(store: kv.KVStore) -> None:
        store.set_optimizer("adamw", learning_rate=0.1)  # its states have the names of adam's

    def no_states(store: kv.KVStore) -> None:
        store.set_optimizer("sgd", learning_rate=0.1)
        store.set_optimizer("adamw", learning_rate=0.1)

    def put(store: kv.KVStore) -> None:
        store.put_rows("t", kv.RowSparse([6, 9], torch.full((2, WIDTH), 5.0)))

    def work(store: kv.KVStore) -> None:
        store.set_optimizer("adam", learning_rate=0.1)
        store.init("t", KEPT)
        since = None
        for change in (lambda _: None, load, other_rule, no_states, put):
            push(store, 0, 12)
            if store.rank == 0:
                since = store.save_table("t", tmp_path / "table").wait()
            store.barrier()
            change(store)
            store.barrier()
            push(store, 0, 3)
            if store.rank == 0:
                caplog.clear()
                store.save_table("t", tmp_path / "table", since=since)
                store.save_table("t", tmp_path / change.__name__)
                delta, whole = kv.open_table(tmp_path / "table", verify=True), kv.open_table(tmp_path / change.__name__)
                assert torch.equal(delta.lookup(IDS), whole.lookup(IDS))
                assert parts_of(delta) == parts_of(whole)
                said = [message for message in caplog.messages if "all rows are saved, not only changes" in message]
                assert (delta.manifest.base is None) == (len(said) == 1) == (change.__name__ != "<lambda>")
            store.barrier()

    run(work)


def parts_of(opened: kv.OpenTable) -> dict[int, list[tuple[str, bytes]]]:
    """What belongs to each row of a saved table beside its values."""
    return {
        int(number): [(name, part[place].tobytes()) for name, part in page.parts.items()]
        for page in opened.pages()
        for place, number in enumerate(page.ids)
    }


def test_a_delta_with_states_continues_no_save_without(tmp_path: Path) -> None:
    with kv.create("local") as store:
        store.set_optimizer("adam", learning_rate=0.1)
        store.init("t", kv.Table(dim=WIDTH))
        push(store, 0, 5)
        since = store.save_table("t", tmp_path, state=False).wait()
        push(store, 0, 2)
        store.save_table("t", tmp_path, since=since)
        opened = kv.open_table(tmp_path)
        assert opened.manifest.base is None
        assert all(len(parts) == len(opened.manifest.parts) > 1 for parts in parts_of(opened).values())
        store.save_table("t", tmp_path, state=False, since=opened.version)
        assert kv.open_table(tmp_path).manifest.base is not None


def test_a_delta_continues_no_save_of_an_older_version_which_still_loads(tmp_path: Path) -> None:
    with kv.create("local") as store:
        begin(store, kv.Table(dim=WIDTH))
        push(store, 0, 5)
        since = store.save_table("t", tmp_path).wait()
        path = tmp_path / "save-00000001" / "manifest.json"
        fields = json.loads(path.read_text())
        del fields["lineages"]
        path.write_text(json.dumps(fields))
        store.init("other", kv.Table(dim=WIDTH))
        store.load_table("other", tmp_path)
        assert torch.equal(*(store.row_sparse_pull(key, row_ids=IDS) for key in ("t", "other")))
        push(store, 0, 2)
        store.save_table("t", tmp_path, since=since)
        assert kv.open_table(tmp_path).manifest.base is None


def test_a_table_whose_rows_have_all_gone_keeps_its_count_of_updates(tmp_path: Path) -> None:
    table = kv.Table(dim=WIDTH, evict=kv.Unseen(1))
    with kv.create("local") as store:
        store.set_optimizer("adam", learning_rate=0.1)
        store.init(["t", "other"], [table, table])
        push(store, 0, 2)
        for _ in range(3):
            push(store, 0, 0)
        assert store.table_statistics("t")["rows"] == 0
        store.save_table("t", tmp_path)
        store.load_table("other", tmp_path)
        for key in ("t", "other"):
            store.push(key, grads(torch.arange(4), 1.0), wait=True)
            store.push(key, grads(torch.arange(4), 3.0), wait=True)
        assert torch.equal(*(store.row_sparse_pull(key, row_ids=range(4)) for key in ("t", "other")))
