"""Resuming: a run that was interrupted ends with the bits of one that was not; files that cannot be gone on from."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fitted import SGD, go_on, loader, network, run, same_bits, samples, state
from threaded import ThreadedJob
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader

import kvstore as kv
from workers import Checkpoint, CheckpointError, Reducer, SplitBatchSampler, callbacks, fit, schedules


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThreadedJob]:
    with ThreadedJob(workers=2, servers=2, bigarray_bound=30) as cluster:
        yield cluster


HOWS: dict[str, dict[str, Any]] = {
    "momentum": {"optimizer": "sgd", "optimizer_params": SGD},
    "adam": {"optimizer": "adam", "optimizer_params": {"learning_rate": 0.01}},
    "2bit": {
        "optimizer": "adam",
        "optimizer_params": {"learning_rate": 0.01},
        "compression_params": {"type": "2bit", "threshold": 0.05},
    },
    "a schedule": {
        "optimizer_params": {"learning_rate": 0.1, "lr_scheduler": schedules.MultiFactorScheduler([7, 13], 0.5)},
    },
    "updates in the workers": {"optimizer_params": SGD, "update_on_kvstore": False},
}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("epoch", "batch"), [(2, 0), (1, 3), (1, 5)])
def test_two_workers_go_on_to_the_bit(cluster: ThreadedJob, tmp_path: Path, how: str, epoch: int, batch: int) -> None:
    prefix = str(tmp_path / "model")

    def work(store: kv.KVStore, reducer: Reducer, resume: Checkpoint | None = None, epochs: int = 3) -> Any:
        model = network(seed=7 if resume else store.rank)
        data = loader(40, 4, 2, store.rank)
        saving = {
            "epoch_end_callback": callbacks.do_checkpoint(prefix),
            "batch_end_callback": callbacks.do_batch_checkpoint(prefix, max(batch, 1)),
        }
        if resume:
            saving = {}
        history = fit(
            *(model, data, data),
            **{"num_epoch": epochs, "kvstore": store, "reducer": reducer, "resume": resume, **saving, **HOWS[how]},
        )
        return state(model), history

    whole = run(cluster, work)
    resumed = run(cluster, lambda *stores: work(*stores, resume=Checkpoint(prefix, epoch, batch)))
    for (first, history), (second, later) in zip(whole, resumed, strict=True):
        assert same_bits(first, second)
        assert history[epoch:] == later
    names = {path.name for path in tmp_path.iterdir() if f"model-{epoch:04d}." in path.name}
    if not batch:
        expected = {"safetensors", "states", "worker.0", "worker.1"} | ({"states.1"} if how == "2bit" else set())
        assert names == {f"model-000{epoch}.{kind}" for kind in expected}


def test_files_of_an_earlier_run_with_the_same_names(cluster: ThreadedJob, tmp_path: Path) -> None:
    prefix = str(tmp_path / "model")

    def work(how: dict[str, Any], resume: Checkpoint | None = None) -> Any:
        def worker(store: kv.KVStore, reducer: Reducer) -> Any:
            model, data = network(seed=store.rank), loader(40, 4, 2, store.rank)
            saving = [] if resume else [callbacks.do_checkpoint(prefix)]
            stores = {"kvstore": store, "reducer": reducer}
            fit(model, data, num_epoch=3, epoch_end_callback=saving, resume=resume, **stores, **how)
            return state(model)

        return run(cluster, worker)

    decayed = {"optimizer_params": {**SGD, "wd": 0.5}, "compression_params": {"type": "2bit", "threshold": 0.05}}
    work(decayed)
    assert (tmp_path / "model-0002.states.1").exists()
    whole = work({"optimizer_params": SGD})
    resumed = work({"optimizer_params": SGD}, Checkpoint(prefix, 2))
    assert all(map(same_bits, whole, resumed))
    assert not list(tmp_path.glob("*.states.1"))


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


def test_callbacks_remember(tmp_path: Path) -> None:
    prefix = str(tmp_path / "model")

    def train(epochs: int, stopping: callbacks.EarlyStopping, resume: Checkpoint | None = None) -> int:
        history = fit(
            *(network(), loader(8, 4), loader(8, 4)),
            num_epoch=epochs,
            optimizer_params={"learning_rate": 0.0},
            eval_metric="ce",
            eval_end_callback=stopping,
            epoch_end_callback=callbacks.do_checkpoint(prefix),
            resume=resume,
        )
        return len(history)

    assert train(2, callbacks.EarlyStopping("cross-entropy", 3, min_delta=10)) == 2
    assert train(9, callbacks.EarlyStopping("cross-entropy", 3, min_delta=10), Checkpoint(prefix, 2)) == 2


def _warm(optimizer: torch.optim.Optimizer) -> Any:
    first, second = LambdaLR(optimizer, lambda done: 0.1 * (1 + done)), ExponentialLR(optimizer, 0.9)
    return SequentialLR(optimizer, [first, second], [3])


SCHEDULERS: dict[str, tuple[str, Any]] = {
    "by epoch": ("epoch", lambda optimizer: StepLR(optimizer, 1, 0.5)),
    "milestones": ("batch", lambda optimizer: MultiStepLR(optimizer, [4, 9])),
    "with momentum": ("batch", lambda optimizer: OneCycleLR(optimizer, 0.2, total_steps=15)),
    "cosine": ("batch", lambda optimizer: CosineAnnealingLR(optimizer, 15)),
    "one after another": ("batch", _warm),
    "plateau": ("eval", lambda optimizer: ReduceLROnPlateau(optimizer, "max", patience=0)),
}


@pytest.mark.parametrize("which", SCHEDULERS)
@pytest.mark.parametrize(("epoch", "batch"), [(2, 0), (1, 2)])
@pytest.mark.filterwarnings("ignore:The epoch parameter in .scheduler.step")  # torch 2.5's SequentialLR, in itself
def test_torchs_schedulers_go_on_to_the_bit(
    cluster: ThreadedJob, tmp_path: Path, which: str, epoch: int, batch: int
) -> None:
    """Shares are uneven: 5 batches and 3."""
    prefix = str(tmp_path / "model")
    moment, make = SCHEDULERS[which]
    models = {(rank, again): network(seed=rank + 2 * again) for rank in (0, 1) for again in (False, True)}

    def work(store: kv.KVStore, reducer: Reducer, resume: Checkpoint | None = None) -> Any:
        model, rates = models[store.rank, resume is not None], []
        data = loader(20 if store.rank == 0 else 12, 4)

        def note(number: int, *_: Any) -> None:
            rates.append((number, scheduler._scheduler.optimizer.param_groups[0]["lr"]))

        scheduler = callbacks.TorchScheduler(make)
        called: dict[str, list[Any]] = {"batch": [], "epoch": [], "eval": []}
        if resume is None:  # first in their lists, and yet called last
            called["epoch"].append(callbacks.do_checkpoint(prefix))
            called["batch"].append(callbacks.do_batch_checkpoint(prefix, 2))
        called[moment].append(scheduler)
        called["epoch"].append(note)
        fit(
            *(model, data, data),
            num_epoch=3,
            kvstore=store,
            reducer=reducer,
            optimizer_params=SGD,
            resume=resume,
            **{f"{moment}_end_callback": its for moment, its in called.items()},
        )
        return state(model), rates

    whole = run(cluster, work)
    resumed = run(cluster, lambda *stores: work(*stores, resume=Checkpoint(prefix, epoch, batch)))
    assert whole[0][1] == whole[1][1]
    assert len({rate for _, rate in whole[0][1]}) > 1
    for (first, rates), (second, later) in zip(whole, resumed, strict=True):
        assert same_bits(first, second)
        assert rates[epoch:] == later


def test_what_is_no_scheduler_for_fit() -> None:
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    with pytest.raises(kv.UsageError, match=r"TorchScheduler takes a function .*, not StepLR"):
        callbacks.TorchScheduler(StepLR(optimizer, 3))  # type: ignore[arg-type]
    with pytest.raises(kv.UsageError, match="has made no scheduler, but a NoneType"):
        fit(network(), loader(8, 4), num_epoch=1, epoch_end_callback=callbacks.TorchScheduler(lambda _: None))
    plateau = callbacks.TorchScheduler(lambda optimizer: ReduceLROnPlateau(optimizer))
    with pytest.raises(kv.UsageError, match="ReduceLROnPlateau needs a metric: give it as eval_end_callback"):
        fit(network(), loader(8, 4), num_epoch=1, epoch_end_callback=plateau)
    other = callbacks.TorchScheduler(lambda optimizer: ReduceLROnPlateau(optimizer), monitor="f1")
    with pytest.raises(kv.UnknownName, match="no metric 'f1' to monitor"):
        fit(network(), loader(8, 4), loader(8, 4), num_epoch=1, eval_end_callback=other)


# ---- files


def test_the_names_of_the_files(saved: Checkpoint) -> None:
    assert saved.weights.name == "model-0001.safetensors"
    assert {path.name for path in saved.weights.parent.iterdir()} == {
        f"model-{stem}.{kind}"
        for stem in ("0000-000001", "0000-000002", "0001")
        for kind in ("safetensors", "states", "worker.0")
    }


def test_epochs_that_are_done_are_not_trained_again(saved: Checkpoint) -> None:
    model = network(seed=3)
    assert fit(model, loader(8, 4), num_epoch=1, resume=saved, optimizer_params=SGD) == []
    with pytest.raises(kv.UsageError, match="begin_epoch=0, but the checkpoint ends 1 epochs"):
        go_on(saved, begin_epoch=0)


@pytest.mark.parametrize("name", ["weights", "states", "worker"])
def test_missing_and_damaged_files_are_errors_that_name_them(saved: Checkpoint, name: str) -> None:
    path = saved.weights if name == "weights" else getattr(saved, name)(0)
    os.truncate(path, 100)
    with pytest.raises(kv.UsageError, match=rf"{path.name}(: there is no whole checkpoint| is damaged)"):
        go_on(saved)
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"{path.name}: (there is no whole checkpoint|missing)"):
        go_on(saved)


def test_other_files_are_none(saved: Checkpoint) -> None:
    saved.weights.write_bytes(saved.states().read_bytes())
    with pytest.raises(CheckpointError, match=r"safetensors: this is not a file that Checkpoint wrote"):
        go_on(saved)


def test_another_network_and_another_optimizer(saved: Checkpoint) -> None:
    with pytest.raises(kv.Mismatch, match=r"another network's checkpoint: of .1\.bias. it has \[8\], and the model no"):
        go_on(saved, network(batch_norm=False))
    with pytest.raises(kv.UsageError, match="holds the states of sgd, but the optimizer is adam"):
        go_on(saved, optimizer="adam", optimizer_params={"learning_rate": 0.1})


def test_other_data(saved: Checkpoint) -> None:
    with pytest.raises(kv.Mismatch, match="state is of another sampler: length=8 there, 12 here"):
        go_on(saved, data=loader(12, 4))
    within = Checkpoint(saved.prefix, 0, 1)
    with pytest.raises(kv.UsageError, match="this data's sampler has no load_state_dict"):
        go_on(within, data=list(loader(8, 4)))
    with pytest.raises(kv.UsageError, match="a checkpoint within an epoch needs data that can go on there"):
        go_on(within, data=list(loader(8, 4)), resume=None, batch_end_callback=callbacks.do_batch_checkpoint("m", 1))


def test_weights_alone_are_nothing_to_go_on_from(saved: Checkpoint) -> None:
    saved.save_weights(network())
    with pytest.raises(CheckpointError, match="these weights were not saved by fit; load_weights reads them"):
        go_on(saved)


def test_files_of_two_runs(saved: Checkpoint, tmp_path: Path) -> None:
    prefix = str(tmp_path / "other")
    fit(*(network(), loader(8, 4)), num_epoch=1, epoch_end_callback=callbacks.do_checkpoint(prefix))
    saved.worker(0).write_bytes(Checkpoint(prefix, 1).worker(0).read_bytes())
    with pytest.raises(kv.Mismatch, match=r"model-0001.worker.0: of another run than .*model-0001.safetensors"):
        go_on(saved)


@pytest.mark.parametrize("last", ["model-0001.states", "model-0001.worker.0"])
def test_a_save_over_another_runs_files_that_was_cut_off(
    saved: Checkpoint, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    class CutOff(Exception):
        pass

    def cut(self: Checkpoint, *_: Any) -> None:
        raise CutOff

    monkeypatch.setattr(Checkpoint, "save_worker" if last.endswith("states") else "save_weights", cut)
    with pytest.raises(CutOff):
        fit(*(network(), loader(8, 4)), num_epoch=1, epoch_end_callback=callbacks.do_checkpoint(saved.prefix))
    with pytest.raises(CheckpointError, match=r"model-0001.safetensors: there is no whole checkpoint"):
        go_on(saved)


def test_another_number_of_workers_leaves_out_what_each_had(
    saved: Checkpoint, cluster: ThreadedJob, caplog: pytest.LogCaptureFixture
) -> None:
    def work(store: kv.KVStore, reducer: Reducer) -> int:
        options = {"kvstore": store, "reducer": reducer, "num_epoch": 2, "optimizer_params": SGD}
        with pytest.raises(kv.Mismatch, match="saved within an epoch by 1 workers, here are 2"):
            fit(network(), loader(8, 4, 2, store.rank), resume=Checkpoint(saved.prefix, 0, 1), **options)
        return 0

    assert run(cluster, work) == [0, 0]

    def after(store: kv.KVStore, reducer: Reducer) -> int:
        options = {"kvstore": store, "reducer": reducer, "num_epoch": 2, "optimizer_params": SGD}
        return len(fit(network(), loader(8, 4, 2, store.rank), resume=saved, **options))

    assert run(cluster, after) == [1, 1]
    assert "saved by 1 workers, here are 2: what each had of its own is left out" in caplog.text


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

    with pytest.raises(kv.UsageError, match="this state of the model is none: _extra_state"):
        checkpoint.save_weights(Odd(2, 2))
    with pytest.raises(kv.UsageError, match="must be fit for JSON"):
        checkpoint.save_weights(model, {"tensor": torch.zeros(1)})
