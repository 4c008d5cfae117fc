"""Random numbers go on where they were."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damaged import rewrite
from fitted import SGD, go_on, loader, same_bits, samples, state
from torch import nn
from torch.utils.data import DataLoader

from workers import Checkpoint, CheckpointError, callbacks, fit
from workers.fitting import randomness


class Noisy(nn.Module):
    """Draws from all generators that a program may use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs * (1 + random.random() + np.random.normal()))


@pytest.mark.parametrize(("epoch", "batch"), [(2, 0), (1, 2)])
def test_random_numbers_go_on_where_they_were(tmp_path: Path, epoch: int, batch: int) -> None:
    prefix = str(tmp_path / "model")

    def train(model: nn.Module, resume: Checkpoint | None = None) -> Any:
        data = loader(20, 4)
        if not batch:
            data = DataLoader(samples(20), 4, shuffle=True)  # an order that comes from torch's generator
        saving = {"batch_end_callback": callbacks.do_batch_checkpoint(prefix, 2)} if batch else {}
        history = fit(
            *(model, data, DataLoader(samples(9), 4, shuffle=True)),
            num_epoch=3,
            optimizer_params=SGD,
            epoch_end_callback=callbacks.do_checkpoint(prefix),
            resume=resume,
            **saving,
        )
        return state(model), history

    for seeded in (torch.manual_seed, np.random.seed, random.seed):
        seeded(3)
    first, history = train(Noisy())
    for seeded in (torch.manual_seed, np.random.seed, random.seed):
        seeded(4)
    second, later = train(Noisy(), Checkpoint(prefix, epoch, batch))
    assert same_bits(first, second)
    assert history[epoch:] == later


def drawn(place: int, left: int) -> torch.Tensor:
    """A state of torch's generator that is at word ``place``, and believes that so many are left."""
    words = bytearray(torch.Generator().get_state().numpy().tobytes())
    struct.pack_into("=iiQ", words, 8, left, 1, place)
    return torch.frombuffer(words, dtype=torch.uint8)


NUMPY: dict[str, Any] = {
    "before its words": {"state": {"key": [1] * 624, "pos": -1}},
    "behind its words": {"state": {"key": [1] * 624, "pos": 625}},
    "far away": {"state": {"key": [1] * 624, "pos": 10**9}},
    "at no place": {"state": {"key": [1] * 624, "pos": True}},
    "too few words": {"state": {"key": [1] * 623, "pos": 5}},
    "a word too large": {"state": {"key": [2**32] * 624, "pos": 5}},
    "no words": {"state": {"key": "x" * 624, "pos": 5}},
    "nothing": {"state": {}},
    "another generator": {"bit_generator": "PCG64"},
    "two numbers left": {"has_gauss": 2},
    "no number left": {"gauss": None},
}


@pytest.mark.parametrize("how", NUMPY)
def test_numpys_state_is_looked_at(saved: Checkpoint, how: str) -> None:
    rewrite(saved.worker(0), lambda own, _: own["random"]["numpy"].update(NUMPY[how]))
    with pytest.raises(CheckpointError, match=r"model-0001.worker.0: damaged"):
        go_on(saved)


@pytest.mark.parametrize(
    "python", [None, [3, [1] * 624, None], [3, [1] * 624 + [625], None], [3, [10**30] * 625, None], [3, [1] * 625, "x"]]
)
def test_pythons_state_is_looked_at(saved: Checkpoint, python: Any) -> None:
    rewrite(saved.worker(0), lambda own, _: own["random"].update(python=python))
    with pytest.raises(CheckpointError, match=r"model-0001.worker.0: damaged"):
        go_on(saved)


@pytest.mark.parametrize(
    "words",
    [
        torch.zeros(0, dtype=torch.uint8),
        torch.zeros(5056, dtype=torch.uint8),
        torch.full((5056,), 255, dtype=torch.uint8),
        torch.zeros(5056),
        drawn(624, 600),  # torch itself would take it, and read past its words
        drawn(0, 2),
    ],
)
def test_torchs_state_is_looked_at(saved: Checkpoint, words: torch.Tensor) -> None:
    rewrite(saved.worker(0), lambda _, tensors: tensors.update({"random/torch": words}))
    with pytest.raises(CheckpointError, match=r"model-0001.worker.0: damaged"):
        go_on(saved)


def test_a_state_of_torchs_is_where_it_should_be() -> None:
    """What is looked at is torch's own layout, whatever was drawn."""
    for count in (0, 1, 7, 623, 624, 625, 1249):
        with torch.random.fork_rng():
            torch.manual_seed(count)
            torch.rand(count)
            randomness.require(*randomness.state([]), [])
