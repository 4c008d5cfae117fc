from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from cifar import options, resnet
from cifar.checkpoint import Checkpoint, CheckpointError
from cifar.files import replacing
from safetensors import safe_open

ARGS = options.parse(["--num-layers", "8", "--model-prefix", "model"])


class Trainer:
    """What a checkpoint needs of one."""

    def __init__(self, states=""):
        self.states = states

    def save_states(self, path):
        Path(path).write_text(self.states)

    def load_states(self, path):
        self.states = Path(path).read_text()


def model(seed, layers=8):
    torch.manual_seed(seed)
    model = resnet.build("resnet", layers)
    model(torch.randn(4, 3, 32, 32))  # so that there are statistics
    return model


def test_weights_statistics_and_states_come_back(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    checkpoint = Checkpoint(str(tmp_path / "new" / "model"), 1)
    old, new, trainer = model(1), model(2), Trainer()
    checkpoint.save(old, Trainer("momentum"), ARGS)
    checkpoint.load_weights(new)
    checkpoint.load_states(trainer)
    assert trainer.states == "momentum"
    assert all(tensor.equal(new.state_dict()[name]) for name, tensor in old.state_dict().items())
    assert caplog.messages == [f'Saved checkpoint to "{tmp_path}/new/model-0001.safetensors"']
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"model-0001.safetensors", "model-0001.states"}


def test_a_checkpoint_says_how_it_was_made(tmp_path):
    checkpoint = Checkpoint(str(tmp_path / "model"), 12)
    checkpoint.save(model(1), Trainer(), ARGS)
    with safe_open(tmp_path / "model-0012.safetensors", framework="pt") as file:
        metadata = file.metadata()
    assert metadata["epoch"] == "12"
    assert json.loads(metadata["arguments"])["num_layers"] == 8


def test_a_missing_checkpoint_is_an_error_that_names_it(tmp_path):
    checkpoint = Checkpoint(str(tmp_path / "model"), 1)
    with pytest.raises(CheckpointError, match=r"model-0001.safetensors: there is no whole checkpoint"):
        checkpoint.load_weights(model(1))
    with pytest.raises(CheckpointError, match=r"model-0001.states: missing"):
        checkpoint.load_states(Trainer())


def test_a_damaged_checkpoint_is_an_error_that_names_it(tmp_path):
    checkpoint = Checkpoint(str(tmp_path / "model"), 1)
    checkpoint.save(model(1), Trainer(), ARGS)
    os.truncate(checkpoint.weights, 1000)
    with pytest.raises(CheckpointError, match="there is no whole checkpoint"):
        checkpoint.load_weights(model(1))


def test_another_networks_checkpoint_is_an_error_that_says_which(tmp_path):
    checkpoint = Checkpoint(str(tmp_path / "model"), 1)
    checkpoint.save(model(1), Trainer(), ARGS)
    with pytest.raises(CheckpointError, match="made with --network resnet --num-layers 8"):
        checkpoint.load_weights(model(1, layers=14))


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    def fail():
        with replacing(tmp_path / "file") as part:
            part.write_text("half")
            raise OSError("disk full")

    (tmp_path / "file").write_text("old")
    with pytest.raises(OSError, match="disk full"):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"
