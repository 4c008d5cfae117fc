"""What a worker adds to checkpoints: at worker 0 what is shared, at each worker what is its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from kvstore.checkpoint.folders import promise_of
from kvstore.checkpoint.stateful import unpacked
from kvstore.client.checkpointing import WorkerPart
from kvstore.client.resuming import TrainedStore
from kvstore.errors import CheckpointError


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
    own = WorkerPart(rank)
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
    own, stores = WorkerPart(1), [Compressed()]
    assert not own.has_own([])
    assert own.has_own(stores)
    assert not own.has_shared
    assert written(own, tmp_path, 1, stores) == {"residuals.2": ({}, {"compression": "small"})}
    assert written(own, tmp_path, 1, stores, shared_only=True) == {}


def test_whose_things_count() -> None:
    own = WorkerPart(1)
    own.attach("model", Holder({}), shared=True)
    assert own.has_shared
    assert not own.has_own([])
    own.attach("sampler", Holder({}), shared=False)
    assert own.has_own([])


def test_the_state_is_that_of_the_call(tmp_path: Path) -> None:
    weight = torch.ones(3)
    own = WorkerPart(0)
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
