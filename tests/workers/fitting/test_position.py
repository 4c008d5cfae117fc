"""Where a run is in its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fitted import SGD, go_on, loader, network, run, same_bits, samples, state
from threaded import ThreadedJob
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

import kvstore as kv
from workers import Checkpoint, Reducer, SplitBatchSampler, SplitSampler, callbacks, fit


def test_uneven_shares_and_batches_that_roll_over(cluster: ThreadedJob, tmp_path: Path) -> None:
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

    whole = run(cluster, work)
    resumed = run(cluster, lambda *stores: work(*stores, resume=Checkpoint(prefix, 2)))
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
