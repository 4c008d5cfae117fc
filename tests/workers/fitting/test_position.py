"""Where a run is in its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fitted import SGD, go_on, loader, network, run, same_bits, samples, state
from threaded import ThreadedJob
from torch.utils.data import DataLoader

import kvstore as kv
from workers import Checkpoint, Reducer, SplitBatchSampler, callbacks, fit


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
