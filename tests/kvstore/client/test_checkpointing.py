"""Checkpoints of whole jobs: what is saved, and that a resumed job has the bits of one that went on."""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from every_worker import every_worker_of
from safetensors import safe_open
from threaded import ThreadedJob
from waiting import LONG

from kvstore.checkpoint.checkpoint_reader import CheckpointReader, verify
from kvstore.checkpoint.folders import listed, promise_of
from kvstore.checkpoint.manifest import load_manifest
from kvstore.checkpoint.stateful import unpacked
from kvstore.checkpoint.tensors import write_tensors
from kvstore.client import DistStore
from kvstore.client.checkpointing import Meetings, WorkerPart, told
from kvstore.client.resuming import TrainedStore
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


class Sums:
    """Sums of worker 0 and 1, as a store makes them."""

    def __init__(self) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.both = Barrier(2, timeout=LONG)

    def end(self, rank: int) -> End:
        return End(self, rank)


class End:
    """One worker's end of ``Sums``."""

    def __init__(self, sums: Sums, rank: int) -> None:
        self.sums, self.rank = sums, rank

    def init(self, key: str | list[str], value: torch.Tensor | list[torch.Tensor]) -> None:
        if self.rank == 0 and isinstance(key, list):
            self.sums.values |= {name: each.clone() for name, each in zip(key, value, strict=True)}
        elif self.rank == 0:
            self.sums.values[key] = value.clone()
        self.sums.both.wait()

    def pull(self, key: str, out: torch.Tensor) -> None:
        out.copy_(self.sums.values[key])

    def pushpull(self, key: str, value: torch.Tensor) -> None:
        if self.rank == 0:
            self.sums.values[key] = torch.zeros_like(value)
        for rank in range(2):
            self.sums.both.wait()
            if self.rank == rank:
                self.sums.values[key] += value
        self.sums.both.wait()
        value.copy_(self.sums.values[key])
        self.sums.both.wait()


def together(work: Any) -> list[Any]:
    """Return what ``work`` returns for the end of each of two workers."""
    sums = Sums()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, [sums.end(rank) for rank in range(2)]))


def test_all_hear_what_worker_0_has_found_in_the_directory() -> None:
    assert together(lambda end: told(end, *((7, 5) if end.rank == 0 else (0, 0)))) == [(7, 5)] * 2


def test_each_meeting_has_the_decisions_of_that_meeting() -> None:
    def work(end: End) -> list[Any]:
        meetings = Meetings(end, end.rank, 2)
        first = meetings.meet(end.rank == 1, *((4, 20) if end.rank == 0 else (0, 0)))
        return [first, meetings.meet(True, *((0, 30) if end.rank == 0 else (0, 0)))]

    assert together(work) == [[(4, 20, 0, [1]), (0, 30, 0, [0, 1])]] * 2


def test_where_two_decide_all_take_the_lower_rank_and_nobody_if_none_does() -> None:
    def work(end: End) -> list[Any]:
        meetings = Meetings(end, end.rank, 2)
        both = meetings.meet(False, 4 + end.rank, 20 + end.rank)
        alone = meetings.meet(False, *((6, 30) if end.rank == 1 else (0, 0)))
        return [both, alone, meetings.meet(False, 0, 0)]

    assert together(work) == [[(4, 20, 0, []), (6, 30, 1, []), (0, 0, 0, [])]] * 2


def test_all_hear_which_worker_fails_first_and_why() -> None:
    def work(end: End) -> list[str]:
        meetings = Meetings(end, end.rank, 2)
        said = ["", "", ""], ["", "what is attached as 'möbius'", "x" * 1000]
        return [meetings.failure(why) for why in said[end.rank]] + [meetings.failure("both")]

    told = ["", "worker 1: what is attached as 'möbius'", f"worker 1: {'x' * 600}", "worker 0: both"]
    assert together(work) == [told] * 2


class Holder:
    """A thing whose state is a value."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Compressed(TrainedStore):
    """A store of which only the residuals are looked at."""

    def __init__(self) -> None:
        self.ordinal = 2

    @property
    def compresses(self) -> bool:
        return True

    def residuals(self) -> Any:
        return {}, {"compression": "small"}


def part(rank: int) -> WorkerPart:
    """The part of a worker with a model, which is shared, and a sampler."""
    own = WorkerPart(rank, lambda: rank == 0)
    own.attach("model", Holder({"weight": torch.ones(3)}), shared=True)
    own.attach("sampler", Holder({"seed": rank}), shared=False)
    return own


def written(own: WorkerPart, folder: Path, rank: int, stores: Sequence[TrainedStore] = (), **more: Any) -> Any:
    """What is in a worker's file."""
    own.copy(folder, stores, **more)
    own.write(folder, 1)
    assert own.join()
    with safe_open(folder / f"worker-{rank}.safetensors", "pt") as file:
        return unpacked({name: file.get_tensor(name) for name in file.keys()}, file.metadata()["state"])  # noqa: SIM118


def test_what_is_shared_is_saved_by_worker_0_alone(tmp_path: Path) -> None:
    state = written(part(0), tmp_path, 0)
    assert list(state) == ["model", "sampler"]
    assert state["model"]["weight"].tolist() == [1] * 3
    assert written(part(1), tmp_path, 1) == {"sampler": {"seed": 1}}
    assert list(written(part(0), tmp_path, 0, shared_only=True)) == ["model"]


def test_residuals_are_named_by_their_store(tmp_path: Path) -> None:
    own, stores = WorkerPart(1, lambda: False), [Compressed()]
    assert not own.has_own([])
    assert own.has_own(stores)
    assert not own.has_shared
    assert written(own, tmp_path, 1, stores) == {"residuals.2": ({}, {"compression": "small"})}
    assert written(own, tmp_path, 1, stores, shared_only=True) == {}


def test_whose_things_count() -> None:
    own = WorkerPart(1, lambda: False)
    own.attach("model", Holder({}), shared=True)
    assert own.has_shared
    assert not own.has_own([])
    own.attach("sampler", Holder({}), shared=False)
    assert own.has_own([])


def test_the_state_is_that_of_the_call(tmp_path: Path) -> None:
    weight = torch.ones(3)
    own = WorkerPart(0, lambda: True)
    own.attach("model", Holder({"weight": weight}), shared=True)
    own.copy(tmp_path, [])
    weight.zero_()
    own.write(tmp_path, 1)
    own.join()
    with safe_open(tmp_path / "worker-0.safetensors", "pt") as file:
        assert file.get_tensor("0.0").tolist() == [1] * 3


class Failing(Holder):
    """A thing that cannot say its state."""

    def state_dict(self) -> Any:
        raise RuntimeError("not in this phase")


def test_what_cannot_be_saved_or_written_is_said_by_its_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = part(0)
    own.attach("mine", Holder({"weight": object()}), shared=True)
    with pytest.raises(CheckpointError, match=r"attached as 'mine' cannot be saved: .* this state has a object"):
        own.copy(tmp_path, [])
    own.attach("mine", Failing({}), shared=True)
    with pytest.raises(CheckpointError, match="attached as 'mine' cannot be saved: RuntimeError: not in this phase"):
        own.copy(tmp_path, [])
    own.attach("mine", Holder({}), shared=True)
    with pytest.raises(CheckpointError, match=r"gone/worker-0.safetensors: No such file"):
        own.copy(tmp_path / "gone", [])
    assert list(tmp_path.iterdir()) == []
    own.write(tmp_path, 1)  # nothing was copied
    own.copy(tmp_path, [])
    (tmp_path / "worker-0.safetensors").mkdir()
    with caplog.at_level(logging.ERROR):
        own.write(tmp_path, 2)
        assert not own.join()
    assert "this worker's part of the checkpoint failed: Is a directory" in caplog.text
    assert not promise_of(tmp_path, 0).exists(), "whoever waits for the part sees at once that it does not come"


class Stateless:
    """A thing whose state nobody may ask for."""

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


@every_worker_of("alone")
def test_a_job_without_a_directory_says_how_to_get_one_unless_the_call_is_for_what_is_due(store: DistStore) -> None:
    assert store.attach("stateless", Stateless()) is False
    with pytest.raises(UsageError, match=r"attach\('step', ...\) takes an object with .* load_state_dict, not int"):
        store.attach("step", 3)  # type: ignore[arg-type]
    assert store.save_checkpoint(if_due=True) is None
    with pytest.raises(UsageError, match="set KVSTORE_CHECKPOINT_DIR for all its processes"):
        store.save_checkpoint()
