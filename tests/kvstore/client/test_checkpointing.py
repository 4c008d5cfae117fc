"""Checkpoints of whole jobs: what is saved, and that a resumed job has the bits of one that went on."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from threaded import ThreadedJob
from waiting import LONG

from kvstore.checkpoint.folders import listed
from kvstore.checkpoint.manifest import load_manifest
from kvstore.checkpoint.reader import CheckpointReader
from kvstore.checkpoint.tensors import write_tensors
from kvstore.checkpoint.verify import verify
from kvstore.client import DistStore
from kvstore.errors import CheckpointError, Mismatch, UsageError
from kvstore.job.valid_values import Interval
from kvstore.rule import Rule

KEYS = ["large", "small", "scalar"]  # the first is cut across servers
SHAPES = [(61, 41), (7,), ()]  # of the large one no part is of whole vectors


def gradients(rank: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.rand(shape, generator=generator) - 0.4 for shape in SHAPES]


def first_values() -> list[torch.Tensor]:
    return [torch.full(shape, 0.5) for shape in SHAPES]


class Counter:
    """A thing with state: how many steps have been made, and a tensor."""

    def __init__(self, rank: int) -> None:
        self.steps, self.seen = 0, torch.full((3,), float(rank))

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.seen = state["steps"], state["seen"]


def training(steps: int, optimizer: str = "sgd", compression: dict[str, object] | None = None, **hyper: Any) -> Any:
    """A program: ``steps`` steps in all, those before a checkpoint included; returns the weights."""

    def train(store: DistStore) -> Any:
        counter = Counter(store.rank)
        store.set_optimizer(optimizer, **hyper)
        if compression:
            store.set_gradient_compression(compression)
        store.init(KEYS, first_values())
        store.attach("counter", counter)
        weights = first_values()
        while counter.steps < steps:
            store.pushpull(KEYS, gradients(store.rank, counter.steps), out=weights)
            counter.steps += 1
            counter.seen += 1
            store.save_checkpoint(if_due=True, wait=True)
        if not steps:
            store.pull(KEYS, weights)
        return weights, counter.seen, store.rank == 0 and store

    return train


def run(directory: Path, program: Any, servers: int = 2, workers: int = 2, every: int = 0, **more: Any) -> list[Any]:
    options = {"checkpoint_dir": str(directory), "checkpoint_every": Interval(every), **more}
    with ThreadedJob(workers, servers, **options) as job:
        return job.run(program)


@pytest.mark.parametrize(
    ("optimizer", "hyper"),
    [
        ("sgd", {"learning_rate": 0.1, "momentum": 0.9}),
        ("nag", {"learning_rate": 0.1, "momentum": 0.9}),
        ("adam", {"learning_rate": 0.01}),
        ("adamw", {"learning_rate": 0.01}),
    ],
)
def test_a_job_resumed_with_other_servers_has_the_bits_of_one_that_went_on(
    tmp_path: Path, optimizer: str, hyper: dict[str, Any]
) -> None:
    undisturbed = run(tmp_path / "none", training(9, optimizer, **hyper))
    run(tmp_path, training(7, optimizer, **hyper), every=5)
    (folder,) = listed(tmp_path)
    manifest = verify(folder.path)
    assert (manifest.rounds, manifest.num_servers, set(manifest.parts)) == (5, 2, {0, 1})
    assert {segment.clock for segment in manifest.stores[0].segments} == {5}
    resumed = run(tmp_path, training(9, optimizer, **hyper), 3, checkpoint_resume=str(tmp_path))
    for one, other in zip(undisturbed, resumed, strict=True):
        assert all(map(torch.equal, one[0], other[0]))
        assert torch.equal(one[1], other[1])


def test_residuals_of_workers_are_saved_and_numbers_and_rounds_go_on(tmp_path: Path) -> None:
    compression = {"type": "2bit", "threshold": 0.3}
    program = training(9, "sgd", compression, learning_rate=0.1)
    undisturbed = run(tmp_path / "none", program)
    run(tmp_path, training(6, "sgd", compression, learning_rate=0.1), every=2, checkpoint_keep=2)
    assert [folder.number for folder in listed(tmp_path)] == [2, 3]
    resumed = run(tmp_path, program, 1, every=2, checkpoint_resume=str(tmp_path / "checkpoint-00000002"))
    assert all(map(torch.equal, undisturbed[1][0], resumed[1][0]))
    assert [(each.number, load_manifest(each.path).rounds) for each in listed(tmp_path)] == [(3, 6), (4, 6), (5, 8)]


def test_without_calls_a_checkpoint_is_made_between_two_steps_of_pushes(tmp_path: Path) -> None:
    def train(store: DistStore) -> dict[str, float]:
        store.init(KEYS, first_values())
        store.set_optimizer("sgd", learning_rate=1.0)
        for step in range(4):
            for key, gradient in zip(KEYS, gradients(store.rank, step), strict=True):
                store.push(key, gradient)
        store.barrier()
        statistics = store.statistics()
        return {"made": statistics.checkpoints + statistics.failed_checkpoints}

    run(tmp_path, train, every=2)
    (folder,) = listed(tmp_path)
    manifest = load_manifest(folder.path)
    assert {segment.clock for segment in manifest.stores[0].segments} == {2}
    with CheckpointReader(folder.path) as reader:
        value = reader.value(0, "small")
    summed = sum(gradients(rank, step)[1] for step in range(2) for rank in range(2))
    assert torch.allclose(value, 0.5 - summed)


def test_workers_with_uneven_batches_go_on_saving_together(tmp_path: Path) -> None:
    def train(store: DistStore) -> int:
        store.set_optimizer("sgd", learning_rate=0.1)
        store.init(KEYS, first_values())
        store.attach("counter", Counter(store.rank))
        for epoch in range(2):
            for step in range(5 if (store.rank + epoch) % 2 else 2):
                store.pushpull(KEYS, gradients(store.rank, step))
            store.join()
        for step in range(2):
            store.pushpull(KEYS, gradients(store.rank, step))
        return store.save_checkpoint(wait=True) or 0

    numbers = run(tmp_path, train, every=3)
    assert numbers[0] == numbers[1] > 0
    last = listed(tmp_path)[-1]
    manifest = verify(last.path)
    assert (manifest.rounds, set(manifest.parts)) == (12, {0, 1})


def test_in_an_async_store_worker_0_decides_alone(tmp_path: Path) -> None:
    def train(store: DistStore) -> None:
        store.set_optimizer("sgd", learning_rate=0.1)
        store.init(KEYS, first_values())
        for step in range(5):
            store.pushpull(KEYS, gradients(store.rank, step))

    with ThreadedJob(2, 2, checkpoint_dir=str(tmp_path), checkpoint_every=Interval(2), checkpoint_keep=9) as job:
        job.run(train, "async")
    assert [folder.whole for folder in listed(tmp_path)] != []
    verify(listed(tmp_path)[-1].path)


def test_what_cannot_be_resumed_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def mismatched(store: DistStore) -> None:
        store.set_optimizer("sgd")
        store.init(KEYS, [torch.zeros(3)] * 3)

    run(tmp_path, training(2, learning_rate=0.1), workers=1, every=1)
    with pytest.raises(Mismatch, match=r"'large' is float32\[61, 41\] there, but float32\[3\] here"):
        run(tmp_path, mismatched, workers=1, checkpoint_resume=str(tmp_path))
    with pytest.raises(UsageError, match="states of sgd, but the optimizer is adam"):
        run(tmp_path, training(3, "adam"), workers=1, checkpoint_resume=str(tmp_path))
    newest = listed(tmp_path)[-1].path
    next(newest.glob("store-*")).write_bytes(b"lies")
    with pytest.raises(CheckpointError, match="damaged"):
        run(tmp_path, training(3), workers=1, checkpoint_resume=str(tmp_path))
    with caplog.at_level(logging.WARNING):
        run(tmp_path, training(1), workers=1, checkpoint_resume=str(tmp_path / "none"))
    assert "begins anew" in caplog.text


def test_a_checkpoint_that_fails_is_said_and_counted_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(store: DistStore) -> tuple[int, int]:
        store.set_optimizer("sgd", learning_rate=0.1)
        store.init(KEYS, first_values())
        store.pushpull(KEYS, gradients(store.rank, 0))
        if store.rank == 0:
            (tmp_path / "checkpoint-00000001").mkdir()
        store.save_checkpoint(wait=True)
        store.pushpull(KEYS, gradients(store.rank, 1))
        store.save_checkpoint(wait=True)
        statistics = store.statistics()
        return statistics.checkpoints, statistics.failed_checkpoints

    assert run(tmp_path, train)[0] == (1, 1)
    assert "training goes on" in caplog.text
    assert [folder[::2] for folder in listed(tmp_path)] == [(2, True)]


class Unsaveable(Counter):
    """A thing whose state cannot be saved for a while."""

    bad = True

    def state_dict(self) -> dict[str, Any]:
        return {"seen": np.arange(3)} if self.bad else super().state_dict()


@pytest.mark.parametrize("whose", [(1,), (0, 1)])
def test_a_state_that_cannot_be_saved_is_named_at_once_and_later_ones_are_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, whose: tuple[int, ...]
) -> None:
    def train(store: DistStore) -> Any:
        store.set_optimizer("sgd", learning_rate=0.1)
        store.init(KEYS, first_values())
        mine = Unsaveable(store.rank)
        if store.rank in whose:
            store.attach("mine", mine)
        saved = []
        for step in range(3):
            store.pushpull(KEYS, gradients(store.rank, step))
            saved.append(store.save_checkpoint(wait=step == 2))
            mine.bad = step < 1
        return saved, store.statistics().failed_checkpoints

    assert run(tmp_path, train) == [([None, None, 3], 2)] * 2
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(said) == 2, "one line each, of worker 0"
    assert f"no checkpoint 1, and training goes on: worker {whose[0]}: what is attached as 'mine' cannot" in said[0]
    assert [folder[::2] for folder in listed(tmp_path)] == [(3, True)]


def test_a_part_that_one_worker_cannot_write_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, *args: Any) -> Any:
        if path == tmp_path / "checkpoint-00000001" / "worker-1.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_tensors(path, *args)

    def train(store: DistStore) -> list[int | None]:
        store.set_optimizer("sgd", learning_rate=0.1)
        store.init(KEYS, first_values())
        store.attach("counter", Counter(store.rank))
        store.pushpull(KEYS, gradients(store.rank, 0))
        return [store.save_checkpoint(wait=True) for _ in range(2)]

    monkeypatch.setattr("kvstore.client.checkpointing.write_tensors", write)
    assert run(tmp_path, train, timeout_s=LONG) == [[None, 2]] * 2
    assert "worker-1.safetensors: this worker's part of the checkpoint failed: No space left" in caplog.text
    assert f"there is no checkpoint 1, and training goes on: worker 1 could not write {tmp_path}" in caplog.text
    assert [folder[::2] for folder in listed(tmp_path)] == [(2, True)]


def test_a_quorum_is_captured_wherever_its_rounds_are(tmp_path: Path) -> None:
    def train(store: DistStore) -> None:
        store.set_optimizer("sgd", learning_rate=0.1)
        store.init(KEYS, first_values())
        for step in range(4):
            store.pushpull(KEYS, gradients(store.rank, step))
        store.barrier()

    with ThreadedJob(2, 2, checkpoint_dir=str(tmp_path), checkpoint_every=Interval(2)) as job:
        job.run(train, rule=Rule("sync", quorum=1))
    assert all(segment.clock >= 2 for segment in verify(listed(tmp_path)[-1].path).stores[0].segments)
