"""Which store ``kvstore=`` means."""

from __future__ import annotations

import gc
import logging
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from threaded import ThreadedJob

import kvstore as kv
from kvstore.client import DistStore
from workers.common.checks import at_least, on_off_auto
from workers.common.gather import Gather, digest, require_sums
from workers.common.row_steps import row_steps
from workers.common.run_log import log_line
from workers.common.stores import open_store, store_type

STARTED_BY = [
    {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "9091", "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1"},
    {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
    {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
    {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
]


def test_auto_is_this_process_alone_outside_of_a_job() -> None:
    assert store_type("auto") == store_type("Auto") == "device"
    store = open_store("auto")
    assert (store.type, store.num_workers) == ("device", 1)


@pytest.mark.parametrize("variables", STARTED_BY, ids=["launch.py", "torchrun", "mpirun", "srun"])
def test_auto_is_synchronous_in_a_job(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert store_type("auto") == "dist_sync"
    assert store_type("local") == "local"


def test_other_names_are_what_kvstore_has_under_them() -> None:
    assert store_type("dist_async") == "dist_async"
    with pytest.raises(kv.UnknownName, match="choose from"):
        open_store("pigeon")


def test_a_store_is_used_as_it_is() -> None:
    store = kv.create("local")
    assert open_store(store) is store
    assert store_type(store) == "local"


# ---- A few integers of every worker, for all


def test_every_worker_gets_the_rows_of_all_by_rank(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> Any:
        gather = Gather(store, "/test", 3)
        return [gather.exchange([store.rank + 1, 2**62 + turn]) for turn in range(2)]

    workers = range(cluster.workers)
    rows = [[[rank + 1, 2**62 + turn, 0] for rank in workers] for turn in range(2)]
    assert cluster.run(work) == [rows for _ in workers]


def test_a_mean_is_the_same_to_the_bit_on_all(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> float:
        return Gather(store, "/test", 2).mean([0.1, 0.2][store.rank])

    assert pair.run(work) == [(0.1 + 0.2) / 2] * 2


@given(st.floats(allow_nan=False))
def test_alone_a_mean_is_the_number(number: float) -> None:
    assert Gather(kv.create("local"), "/test", 2).mean(number) == number


def test_a_table_is_shared_or_says_that_the_store_is_in_use() -> None:
    store = kv.create("local")
    Gather(store, "/test")
    Gather(store, "/test")
    with pytest.raises(kv.UsageError, match=r"make a second one with kvstore\.create"):
        Gather(store, "/test", shared=False)


@pytest.mark.parametrize("before", [True, False])
def test_a_store_that_does_not_sum_is_refused(before: bool) -> None:
    def update(key: Any, pushed: torch.Tensor, stored: torch.Tensor) -> None:
        stored.add_(pushed)

    store = kv.create("local")
    if before:
        store.set_updater(update)
    gather = Gather(store, "/test")
    if not before:
        store.set_updater(update)
    with pytest.raises(kv.UsageError, match="does not sum what is pushed"):
        gather.exchange([1])


@pytest.mark.parametrize("kind", ["dist_async", "dist_ssp"])
def test_stores_where_every_push_is_an_update_cannot_sum(kind: str) -> None:
    with pytest.raises(kv.UsageError, match=f"'{kind}' store updates for every push"):
        require_sums(kind)
    require_sums("dist_sync")
    require_sums("device")


def test_a_digest_is_small_enough_to_be_added_and_differs() -> None:
    texts = [f"parameter {number}" for number in range(1000)]
    assert len({digest(text) for text in texts}) == 1000
    assert all(0 <= digest(text) < 2**52 for text in texts)
    assert digest("a") == digest("a")


class Trainer:
    def has_gradients(self) -> bool:
        return True


def test_trainer_and_tables_of_one_store_find_each_other() -> None:
    store = kv.create("local")
    steps = row_steps(store)
    assert row_steps(store) is steps
    assert row_steps(kv.create("local")) is not steps
    with steps.pushes.paused():
        steps.pushes.step_over()  # nothing is there yet


def test_a_trainer_is_known_as_long_as_it_lives() -> None:
    steps, trainer = row_steps(kv.create("local")), Trainer()
    assert steps.trainer_has_gradients is None
    steps.begin(trainer.has_gradients)
    assert steps.trainer_has_gradients is not None
    assert steps.trainer_has_gradients()
    del trainer
    gc.collect()
    assert steps.trainer_has_gradients is None


# ---- Lines of a training: seen without a set-up of logging, and records of the root logger with one


def test_without_a_set_up_of_logging_rank_0_is_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as a program finds it
    for rank in (0, 1):
        log_line(rank, "Epoch[%d] Train-%s=%f", rank, "accuracy", 0.5)
    assert tuple(capsys.readouterr()) == ("", "Epoch[0] Train-accuracy=0.500000\n")
    assert not logging.getLogger().handlers
    monkeypatch.setattr(logging.getLogger().manager, "disable", logging.INFO)  # as by logging.disable
    log_line(0, "not wanted")
    assert capsys.readouterr().err == ""


def test_with_one_lines_are_records_of_the_root_logger(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    log_line(0, "below the level of the root logger")
    caplog.set_level(logging.INFO)
    log_line(1, "Epoch[%d] Time cost=%.3f", 1, 2.0)
    (record,) = caplog.records
    assert (record.name, record.levelname, record.getMessage()) == ("root", "INFO", "Epoch[1] Time cost=2.000")
    assert record.filename == "test_stores.py"
    assert capsys.readouterr().err == ""


# ---- Checks of arguments: integers of a range, and switches that may be left to decide themselves


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_integers_of_any_kind_become_plain_ones(value: Any) -> None:
    assert type(at_least("n", value, 3)) is int
    assert at_least("n", value, 3) == 3


@pytest.mark.parametrize("value", [2, -1, 3.0, True, "3", None, np.float32(3)])
def test_what_is_no_integer_or_too_small(value: Any) -> None:
    with pytest.raises(kv.UsageError, match=r"n=.* must be an integer, at least 3"):
        at_least("n", value, 3)


def test_the_largest_is_64_bits_unless_it_is_said() -> None:
    assert at_least("n", 2**63 - 1, 0) == 2**63 - 1
    with pytest.raises(kv.UsageError, match=f"at most {2**63 - 1}"):
        at_least("n", 2**63, 0)
    with pytest.raises(kv.UsageError, match="n=6 must be an integer, at most 5"):
        at_least("n", 6, 0, 5)


@pytest.mark.parametrize(("value", "meaning"), [(True, True), (False, False), ("auto", None), (None, None)])
def test_a_switch(value: Any, meaning: bool | None) -> None:
    assert on_off_auto("overlap", value) is meaning


@pytest.mark.parametrize("value", ["on", 1, 0, "Auto"])
def test_what_is_no_switch(value: Any) -> None:
    with pytest.raises(kv.UsageError, match=r"overlap=.* must be True, False or 'auto'"):
        on_off_auto("overlap", value)
