"""``fit`` in a job that saves checkpoints: a resumed job makes the rest of an epoch, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fitted import SGD, loader, network, run, same_bits, state
from threaded import ThreadedJob

import kvstore as kv
from kvstore.checkpoint.folders import listed
from kvstore.checkpoint.manifest import load_manifest
from kvstore.job.valid_values import Interval
from workers import Checkpoint, Reducer, fit, schedules

EPOCHS, EVERY = 3, 4


def training(store: kv.KVStore, reducer: Reducer, resume: Checkpoint | None = None) -> Any:
    """Three epochs of five batches on each of two workers."""
    model = network()
    halved = {**SGD, "lr_scheduler": schedules.FactorScheduler(3, 0.5, base_lr=0.1)}
    options = {"num_epoch": EPOCHS, "kvstore": store, "reducer": reducer, "optimizer_params": halved, "resume": resume}

    def wait(_: Any) -> None:
        store.save_checkpoint(if_due=True, wait=True)

    data = loader(20, 2, store.num_workers, store.rank)
    history = fit(model, data, batch_end_callback=wait, **options)
    return state(model), history


def job(directory: Path, program: Any = training, workers: int = 2, servers: int = 2, **more: Any) -> Any:
    options = {"checkpoint_dir": str(directory), "checkpoint_every": Interval(EVERY), "checkpoint_keep": 9, **more}
    with ThreadedJob(workers, servers, bigarray_bound=30, **options) as made:
        return run(made, program)


def test_a_resumed_job_makes_the_rest_of_the_epoch_to_the_bit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    undisturbed = job(tmp_path)
    folders = [folder.path for folder in listed(tmp_path)]
    rounds = {load_manifest(folder).rounds: folder for folder in folders}
    within = rounds[8]
    for servers in (1, 3):
        resumed = job(tmp_path / f"{servers}", servers=servers, checkpoint_resume=str(within))
        for (weights, history), (others, all_history) in zip(resumed, undisturbed, strict=True):
            assert same_bits(weights, others)
            assert history == all_history[1:]
    (alone,) = job(tmp_path / "alone", workers=1, checkpoint_resume=str(within))
    assert len(alone[1]) == 2
    assert "epoch 1 begins again" in caplog.text


def test_two_checkpoints_to_continue_from_are_one_too_many(tmp_path: Path) -> None:
    def both(store: kv.KVStore, reducer: Reducer) -> None:
        training(store, reducer)

    def again(store: kv.KVStore, reducer: Reducer) -> None:
        prefix = str(tmp_path / f"model-{store.rank}")
        Checkpoint(prefix, 1).save_weights(network(), {"epoch": 1, "batch": 0, "run": 1, "num_workers": 9})
        training(store, reducer, Checkpoint(prefix, 1))

    job(tmp_path, both, workers=1)
    with pytest.raises(kv.KVStoreError, match=r"resume=.* was passed, but the job was started with --resume|states"):
        job(tmp_path / "new", again, workers=1, checkpoint_resume=str(tmp_path))
