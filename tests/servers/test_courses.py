"""What is saved, loaded, read and taken over is what was there, in courses by seeds; ``-m faults`` makes very many."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from courses import KINDS, course
from played_shards import PlayedShards

import kvstore as kv
from kvstore.rule import Rule
from kvstore.spec import Spec
from kvstore.table import TableSpec

IDS = np.arange(10)
TABLE = kv.Table(dim=2)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_loaded_read_and_taken_over_is_what_was_there(kind: str) -> None:
    for seed in range(8):
        with course(kind, seed) as made:
            made.run()


@pytest.mark.faults
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_over_very_many_courses(kind: str) -> None:
    for seed in range(2000):
        with course(kind, seed) as made:
            made.run()


def begun(tmp_path: Path, rule: Rule) -> PlayedShards:
    job = PlayedShards(2, rule, tmp_path / "checkpoints")
    job.store.set_optimizer("sgd", learning_rate=1.0)
    job.store.init(["t", "w"], [TABLE, torch.zeros(3)])
    return job


def push(job: PlayedShards, times: int = 1, ids: object = IDS) -> None:
    for _ in range(times):
        rows = kv.RowSparse(ids, -np.ones((len(np.asarray(ids)), 2), np.float32))
        job.store.push(["t", "w"], [rows, -torch.ones(3)], wait=True)


@pytest.mark.parametrize("rule", [Rule(), Rule("async")], ids=str)
@pytest.mark.parametrize("later", [False, True])
def test_a_server_that_takes_over_in_step_goes_on_with_deltas(tmp_path: Path, rule: Rule, later: bool) -> None:
    job = begun(tmp_path, rule)
    push(job, 2)
    for server in job.servers if later else ():
        server.pair()
    since = job.store.save_table("t", tmp_path / "t").wait()
    push(job, 2, [1, 4])
    for server in job.servers:
        server.take_over()
    push(job, 1, [4])
    job.store.save_table("t", tmp_path / "t", since=since)
    opened = kv.open_table(tmp_path / "t")
    assert opened.manifest.base is not None
    assert torch.equal(opened.lookup(IDS), job.store.row_sparse_pull("t", row_ids=IDS))


def test_a_server_that_does_not_know_which_rows_had_gone_saves_them_all(tmp_path: Path) -> None:
    job = begun(tmp_path, Rule())
    push(job, 2)
    since = job.store.save_table("t", tmp_path / "t").wait()
    push(job, 2, [1, 4])
    job.servers[1].pair()
    job.servers[1].take_over()
    job.store.save_table("t", tmp_path / "t", since=since)
    opened = kv.open_table(tmp_path / "t")
    assert opened.manifest.base is None
    assert torch.equal(opened.lookup(IDS), job.store.row_sparse_pull("t", row_ids=IDS))


@pytest.mark.parametrize("rule", [Rule(), Rule("async")], ids=str)
def test_readers_hold_values_over_a_takeover_and_no_older_ones_than_they_say(tmp_path: Path, rule: Rule) -> None:
    job = begun(tmp_path, rule)
    held, rows = job.held("w", Spec((3,), "float32")), job.held("t", TableSpec.of(TABLE))
    push(job, 30)
    assert job.read_value(held, 5).tolist() == [30] * 3
    assert job.read_rows(rows, IDS, 5)[:, 0].tolist() == [30] * 10
    push(job, 10)
    for server in job.servers:
        server.pair()  # a process that counts what it sees would begin here
    push(job, 5)
    for server in job.servers:
        server.take_over()
    assert job.read_value(held, 15).tolist() == [30] * 3
    assert job.read_rows(rows, IDS, 15)[:, 0].tolist() == [30] * 10
    push(job, 20)
    assert job.read_value(held, 15).tolist() == [65] * 3
    assert job.read_rows(rows, IDS, 15)[:, 0].tolist() == [65] * 10


def test_a_job_that_continues_from_a_checkpoint_begins_a_course_of_its_own(tmp_path: Path) -> None:
    job = begun(tmp_path, Rule())
    push(job, 3)
    since = job.store.save_table("t", tmp_path / "t").wait()
    assert job.store.save_checkpoint(wait=True) == 1
    push(job, 2, [0])
    later = job.store.save_table("t", tmp_path / "t", since=since).wait()
    resumed = PlayedShards(2, Rule(), tmp_path / "checkpoints", resume=True)
    resumed.store.set_optimizer("sgd", learning_rate=1.0)
    resumed.store.init(["t", "w"], [TABLE, torch.zeros(3)])
    push(resumed, 3, [5])
    for version in (since, later):
        resumed.store.save_table("t", tmp_path / "t", since=version)
        opened = kv.open_table(tmp_path / "t")
        assert opened.manifest.base is None
        assert opened.lookup(IDS)[:, 0].tolist() == [3, 3, 3, 3, 3, 6, 3, 3, 3, 3]


def test_a_job_that_begins_anew_continues_no_save_of_the_one_before(tmp_path: Path) -> None:
    first, second = begun(tmp_path, Rule()), begun(tmp_path, Rule())
    push(first, 3)
    since = first.store.save_table("t", tmp_path / "t").wait()
    push(second, 3, [2])
    push(second, 1, [5])
    second.store.save_table("t", tmp_path / "t", since=since)
    assert kv.open_table(tmp_path / "t").lookup(IDS)[:, 0].tolist() == [0, 0, 3, 0, 0, 1, 0, 0, 0, 0]
