"""Where a run is in its data."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damaged import rewrite
from fitted import SGD, go_on, loader, network, run, same_bits, samples, state
from threaded import ThreadedJob
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

import kvstore as kv
from workers import Checkpoint, CheckpointError, Reducer, SplitBatchSampler, SplitSampler, callbacks, fit
from workers.fitting import randomness


def test_uneven_shares_and_batches_that_roll_over(pair: ThreadedJob, tmp_path: Path) -> None:
    prefix = str(tmp_path / "model")

    def work(store: kv.KVStore, reducer: Reducer, resume: Checkpoint | None = None) -> Any:
        model, dataset = network(seed=store.rank), samples(43)
        sampler = SplitBatchSampler(dataset, 4, 2, store.rank, "rollover")
        saving = [] if resume else [callbacks.do_checkpoint(prefix)]
        data = DataLoader(dataset, batch_sampler=sampler)
        history = fit(
            *(model, data, data),
            num_epoch=4,
            kvstore=store,
            reducer=reducer,
            optimizer_params=SGD,
            epoch_end_callback=saving,
            resume=resume,
        )
        return state(model), history

    whole = run(pair, work)
    resumed = run(pair, lambda *stores: work(*stores, resume=Checkpoint(prefix, 2)))
    for (first, history), (second, later) in zip(whole, resumed, strict=True):
        assert same_bits(first, second)
        assert history[2:] == later


def test_other_data(saved: Checkpoint) -> None:
    with pytest.raises(kv.Mismatch, match="state is of another sampler: length=8 there, 12 here"):
        go_on(saved, data=loader(12, 4))
    within = Checkpoint(saved.prefix, 0, 1)
    with pytest.raises(kv.UsageError, match="this data's sampler has no load_state_dict"):
        go_on(within, data=list(loader(8, 4)))
    with pytest.raises(kv.UsageError, match="a checkpoint within an epoch needs data that can continue there"):
        go_on(within, data=list(loader(8, 4)), resume=None, batch_end_callback=callbacks.do_batch_checkpoint("m", 1))


class Counting(SequentialSampler):
    """A sampler that counts what it yields, as torchdata's do: its state takes no number."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_sampler_that_counts_what_a_loader_reads_ahead_cannot_continue_within_an_epoch(tmp_path: Path) -> None:
    saving = callbacks.do_batch_checkpoint(str(tmp_path / "m"), 1)
    dataset = samples(8)
    fit(network(), DataLoader(dataset, 4, sampler=Counting(dataset)), num_epoch=1, batch_end_callback=saving)
    ahead = DataLoader(dataset, 4, sampler=Counting(dataset), num_workers=1)
    with pytest.raises(kv.UsageError, match="its state_dict must take the number of items that have been used"):
        fit(network(), ahead, num_epoch=1, batch_end_callback=saving)


def test_batches_are_counted_and_not_their_labels(tmp_path: Path) -> None:
    """A batch of a language model has a label for each token; and the program made the batch sampler itself."""
    prefix, dataset = str(tmp_path / "m"), samples(10)

    def twice(batch: Any) -> Any:
        inputs, labels = zip(*batch, strict=True)
        return torch.stack(inputs * 2), torch.stack(labels * 2)

    def train(resume: Checkpoint | None = None) -> Any:
        model = network(batch_norm=False)
        data = DataLoader(dataset, batch_sampler=BatchSampler(SplitSampler(dataset), 4, False), collate_fn=twice)
        saving = [] if resume else [callbacks.do_batch_checkpoint(prefix, 1)]
        fit(model, data, num_epoch=2, optimizer_params=SGD, batch_end_callback=saving, resume=resume)
        return state(model)

    whole = train()
    for batch in (1, 2, 3):
        assert same_bits(whole, train(Checkpoint(prefix, 0, batch)))


# ---- Random numbers go on where they were


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
