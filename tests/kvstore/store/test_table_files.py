"""Tables in files, in every store: saved while training goes on, loaded elsewhere, served without a store."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from row_stores import ASYNC, MORE_ROUNDS, QUORUM, ROUNDS, WIDTH, begin, each_of, grads, jobs, run, settle
from store_kinds import Run

import kvstore as kv

__all__ = ["jobs", "run"]

GROWING = kv.Table(dim=WIDTH, init="normal", seed=4, evict=kv.Unseen(2))
KEPT = kv.Table(dim=WIDTH, init="normal", seed=4, evict=kv.Unseen(50))
IDS = torch.arange(-20, 60)
every = each_of([*ROUNDS, ASYNC], [*MORE_ROUNDS[:2], QUORUM])


def push(store: kv.KVStore, first: int, last: int) -> None:
    """All workers push the same ids."""
    settle(store, store.push("t", grads(torch.arange(first, last) * 3)))


@every
def test_a_saved_table_is_served_and_loaded_as_it_was(run: Run, tmp_path: Path) -> None:
    def work(store: kv.KVStore) -> None:
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

    run(work)


@every
def test_what_has_changed_since_is_saved_and_what_has_gone_is_not_served(run: Run, tmp_path: Path) -> None:
    def work(store: kv.KVStore) -> None:
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

    run(work)


@every
def test_states_of_another_optimizer_are_left_out(run: Run, tmp_path: Path) -> None:
    def work(store: kv.KVStore) -> None:
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

    run(work)


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
