"""The files of a checkpoint."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from fitted import go_on, network
from safetensors.torch import save_file
from torch import nn

import kvstore as kv
from workers import Checkpoint, CheckpointError


def test_the_names_of_the_files(saved: Checkpoint) -> None:
    assert saved.weights.name == "model-0001.safetensors"
    assert {path.name for path in saved.weights.parent.iterdir()} == {
        f"model-{stem}.{kind}"
        for stem in ("0000-000001", "0000-000002", "0001")
        for kind in ("safetensors", "states", "worker.0")
    }


@pytest.mark.parametrize("name", ["weights", "states", "worker"])
def test_missing_and_damaged_files_are_errors_that_name_them(saved: Checkpoint, name: str) -> None:
    path = saved.weights if name == "weights" else getattr(saved, name)(0)
    os.truncate(path, 100)
    with pytest.raises(kv.UsageError, match=rf"{path.name}(: missing or damaged| is damaged)"):
        go_on(saved)
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"{path.name}: missing"):
        go_on(saved)


def test_other_files_are_none(saved: Checkpoint) -> None:
    saved.weights.write_bytes(saved.states().read_bytes())
    with pytest.raises(CheckpointError, match=r"safetensors: not a file that Checkpoint wrote"):
        go_on(saved)


def test_files_of_mxnet_are_called_what_they_are(saved: Checkpoint) -> None:
    own, params = saved.states().read_bytes(), saved.weights.with_suffix(".params")
    saved.states().write_bytes(pickle.dumps({0: None}))
    with pytest.raises(kv.UsageError, match=r"model-0001.states is a pickle, as MXNet's .states are"):
        go_on(saved)
    saved.states().write_bytes(own)
    saved.weights.unlink()
    params.write_bytes(b"\x12\x01" + bytes(14) + b"\x01")
    with pytest.raises(CheckpointError, match=r"safetensors: missing; model-0001.params is a file of MXNet's arrays"):
        go_on(saved)
    params.rename(saved.weights)
    with pytest.raises(CheckpointError, match=r"safetensors: model-0001.safetensors is a file of MXNet's arrays"):
        go_on(saved)


def test_a_pipe_is_not_waited_for(saved: Checkpoint) -> None:
    for path in (saved.weights.with_suffix(".params"), saved.weights):
        saved.weights.unlink(missing_ok=True)
        os.mkfifo(path)
        with pytest.raises(CheckpointError, match=r"safetensors: (missing or damaged|damaged: it is no plain file)"):
            go_on(saved)


def test_another_network_and_another_optimizer(saved: Checkpoint) -> None:
    with pytest.raises(
        kv.Mismatch, match=r"another network's checkpoint: for .1\.bias. it has \[8\], and the model no"
    ):
        go_on(saved, network(batch_norm=False))
    with pytest.raises(kv.UsageError, match="holds the states of sgd, but the optimizer is adam"):
        go_on(saved, optimizer="adam", optimizer_params={"learning_rate": 0.1})


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    saved: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tensors: Any, path: Path, metadata: Any) -> None:
        Path(path).write_text("half")
        raise OSError("disk full")

    before = {path: path.read_bytes() for path in saved.weights.parent.iterdir()}
    monkeypatch.setattr("workers.fitting.checkpoint.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        saved.save_weights(network())
    assert {path: path.read_bytes() for path in saved.weights.parent.iterdir()} == before


def test_tied_weights_and_what_is_no_tensor(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    checkpoint = Checkpoint(str(tmp_path / "tied"), 1)
    checkpoint.save_weights(model, {"network": "tied"})
    assert checkpoint.load_weights(model) == {"network": "tied"}

    class Odd(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"words": "no tensor"}

    with pytest.raises(kv.UsageError, match="the model's state also has _extra_state"):
        checkpoint.save_weights(Odd(2, 2))
    with pytest.raises(kv.UsageError, match="must be valid as JSON"):
        checkpoint.save_weights(model, {"tensor": torch.zeros(1)})


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "5", "{", '{"format": 5}'])
def test_what_a_file_says_is_none(saved: Checkpoint, text: str) -> None:
    for path in (saved.weights, saved.worker(0)):
        before = path.read_bytes()
        save_file({}, path, {"about": text})
        with pytest.raises(CheckpointError, match=path.name):
            go_on(saved)
        path.write_bytes(before)


def test_a_shape_that_cannot_be(saved: Checkpoint) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [2**63, 0], "data_offsets": [0, 0]}})
    saved.weights.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(CheckpointError, match=saved.weights.name):
        go_on(saved)


def test_a_name_that_the_format_keeps_for_itself(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_parameter("__metadata__", nn.Parameter(torch.ones(1)))
    with pytest.raises(CheckpointError, match="tensor '__metadata__' is named '__metadata__', which safetensors keeps"):
        Checkpoint(str(tmp_path / "m"), 1).save_weights(model)
    assert not list(tmp_path.iterdir())
