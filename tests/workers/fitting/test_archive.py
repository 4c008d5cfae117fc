"""A run that was interrupted: where it is in its data, and that it ends with the bits of one that was not."""

from __future__ import annotations

import json
import logging
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fitted import SGD, go_on, loader, network, require_resumable, run, same_bits, samples, state
from safetensors import safe_open
from safetensors.torch import save_file
from threaded import ThreadedJob
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

import kvstore as kv
from workers import Checkpoint, CheckpointError, Reducer, SplitBatchSampler, SplitSampler, callbacks, fit, schedules
from workers.fitting import randomness


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> None:
    """Let ``change`` have what a file of a checkpoint says, and its tensors, and write them again."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        about = json.loads(file.metadata()["about"])
    change(about, tensors)
    save_file(tensors, path, {"about": json.dumps(about)})


# ---- a run that was interrupted ends with the bits of one that was not; what does not fit together is refused


HOWS: dict[str, dict[str, Any]] = {
    "momentum": {"optimizer": "sgd", "optimizer_params": SGD},
    "adam": {"optimizer": "adam", "optimizer_params": {"learning_rate": 0.01}},
    "2bit": {
        "optimizer": "adam",
        "optimizer_params": {"learning_rate": 0.01},
        "compression_params": {"type": "2bit", "threshold": 0.05},
    },
    "a schedule": {
        "optimizer_params": {"learning_rate": 0.1, "lr_scheduler": schedules.MultiFactorScheduler([7, 13], 0.5)}
    },
    "updates in the workers": {"optimizer_params": SGD, "update_on_kvstore": False},
}


@pytest.mark.parametrize("how", HOWS)
def test_two_workers_go_on_to_the_bit(pair: ThreadedJob, tmp_path: Path, how: str) -> None:
    """From within an epoch; and once from the end of one, and from after the last batch of one."""
    prefix = str(tmp_path / "model")

    def work(store: kv.KVStore, reducer: Reducer, resume: Checkpoint | None = None) -> Any:
        model, data = network(seed=7 if resume else store.rank), loader(40, 4, 2, store.rank)
        options: dict[str, Any] = {"num_epoch": 3, "kvstore": store, "reducer": reducer, "resume": resume, **HOWS[how]}
        if not resume:
            options["epoch_end_callback"] = callbacks.do_checkpoint(prefix)
            options["batch_end_callback"] = callbacks.do_batch_checkpoint(prefix, 1)
        history = fit(model, data, data, **options)
        return state(model), history

    require_resumable(pair, work, prefix, [(2, 0), (1, 3), (1, 5)] if how == "momentum" else [(1, 3)])
    names = {path.name for path in tmp_path.iterdir() if "model-0002." in path.name}
    expected = {"safetensors", "states", "worker.0", "worker.1"} | ({"states.1"} if how == "2bit" else set())
    assert names == {f"model-0002.{kind}" for kind in expected}


def test_files_of_an_earlier_run_with_the_same_names(pair: ThreadedJob, tmp_path: Path) -> None:
    prefix = str(tmp_path / "model")

    def work(how: dict[str, Any], resume: Checkpoint | None = None) -> Any:
        def worker(store: kv.KVStore, reducer: Reducer) -> Any:
            model, data = network(seed=store.rank), loader(40, 4, 2, store.rank)
            saving = [] if resume else [callbacks.do_checkpoint(prefix)]
            stores = {"kvstore": store, "reducer": reducer}
            fit(model, data, num_epoch=3, epoch_end_callback=saving, resume=resume, **stores, **how)
            return state(model)

        return run(pair, worker)

    decayed = {"optimizer_params": {**SGD, "wd": 0.5}, "compression_params": {"type": "2bit", "threshold": 0.05}}
    work(decayed)
    assert (tmp_path / "model-0002.states.1").exists()
    whole = work({"optimizer_params": SGD})
    resumed = work({"optimizer_params": SGD}, Checkpoint(prefix, 2))
    assert all(map(same_bits, whole, resumed))
    assert not list(tmp_path.glob("*.states.1"))


@pytest.mark.parametrize("lost", ["worker.1", "states"])
def test_a_part_that_cannot_be_written_costs_the_checkpoint_and_not_the_training(
    pair: ThreadedJob, tmp_path: Path, caplog: pytest.LogCaptureFixture, lost: str
) -> None:
    """Uneven shares: worker 1 has left the second epoch's meetings when worker 0 saves its last batches."""
    prefix = tmp_path / "model"

    def work(store: kv.KVStore, reducer: Reducer) -> int:
        data = loader(8 + 8 * (1 - store.rank), 4)
        each = callbacks.do_batch_checkpoint(f"{prefix}", 1), callbacks.do_checkpoint(f"{prefix}")
        run = fit(
            *(network(), data),
            num_epoch=2,
            batch_end_callback=each[0],
            epoch_end_callback=each[1],
            optimizer_params=SGD,
            split=False,
            kvstore=store,
            reducer=reducer,
        )
        return len(run)

    for name in (
        "model-0001",
        "model-0000-000002",
    ):  # a folder in the file's place, which is not a full disk, but alike
        (tmp_path / f"{name}.{lost}" / "full").mkdir(parents=True)
    with caplog.at_level(logging.INFO):
        assert run(pair, work) == [2, 2]
    said = [record.getMessage() for record in caplog.records if "there is no checkpoint" in record.getMessage()]
    assert [(line.split()[4], line.count(f".{lost}: ")) for line in said] == [
        ("model-0000-000002,", 1),
        ("model-0001,", 1),
    ]
    saved = {
        record.getMessage().split("model-")[1].split(".")[0]
        for record in caplog.records
        if record.getMessage().startswith("Saved")
    }
    assert saved == {"0000-000001", "0000-000003", "0000-000004", *(f"0001-00000{n}" for n in range(1, 5)), "0002"}
    files = {path.name.split(".", 1)[0] for path in tmp_path.iterdir() if path.is_file()}
    assert files == {f"model-{name}" for name in saved}


def test_a_worker_that_saves_alone_does_not_wait_for_the_others(pair: ThreadedJob, tmp_path: Path) -> None:
    def work(store: kv.KVStore, reducer: Reducer) -> None:
        saving = callbacks.do_checkpoint(f"{tmp_path}/m") if store.rank == 0 else None
        data = loader(8, 4)
        fit(
            network(),
            data,
            num_epoch=1,
            epoch_end_callback=saving,
            optimizer_params=SGD,
            kvstore=store,
            reducer=reducer,
            split=False,
        )

    run(pair, work)
    assert (tmp_path / "m-0001.safetensors").exists()


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


def test_an_evaluation_that_fails_costs_no_checkpoint_and_is_made_by_the_run_that_goes_on(tmp_path: Path) -> None:
    prefix, fails = f"{tmp_path}/model", {"now": 1}

    def train(epochs: int, resume: Checkpoint | None = None) -> tuple[Any, ...]:
        seen = []

        def evaluate(param: callbacks.BatchEndParam) -> None:
            if param.epoch == fails["now"]:
                raise RuntimeError("broken")
            seen.append((param.epoch, torch.rand(1).item()))  # it draws random numbers

        stopping, saving = callbacks.EarlyStopping(patience=9), callbacks.do_checkpoint(prefix, best="accuracy")
        model = network(seed=1)
        torch.manual_seed(5)
        options: Any = {"eval_batch_end_callback": evaluate, "eval_end_callback": stopping}
        options |= {"epoch_end_callback": saving, "kvstore": None, "optimizer_params": SGD, "resume": resume}
        fit(model, loader(12, 4), loader(4, 4), num_epoch=epochs, **options)
        return seen, state(model), stopping.state_dict(), saving.state_dict(), torch.rand(1).item()

    with pytest.raises(RuntimeError, match="broken"):
        train(3)
    fails["now"] = -1
    resumed = train(3, Checkpoint(prefix, 2))
    assert [epoch for epoch, _ in resumed[0]] == [1, 2]
    whole = train(3)
    assert resumed[0] == whole[0][1:]
    assert same_bits(resumed[1], whole[1])
    assert resumed[2:] == whole[2:]
    again = train(3, Checkpoint(prefix, 3))
    assert again[0] == []
    assert again[2:4] == whole[2:4], "the last checkpoint has what followed from its evaluation"


def test_epochs_that_are_done_are_not_trained_again(saved: Checkpoint) -> None:
    model = network(seed=3)
    assert fit(model, loader(8, 4), num_epoch=1, resume=saved, optimizer_params=SGD) == []
    with pytest.raises(kv.UsageError, match="begin_epoch=0, but the checkpoint has 1 finished epochs"):
        go_on(saved, begin_epoch=0)


def test_weights_alone_are_nothing_to_go_on_from(saved: Checkpoint) -> None:
    saved.save_weights(network())
    with pytest.raises(CheckpointError, match="these weights were not saved by fit; read them with load_weights"):
        go_on(saved)


def test_files_of_two_runs(saved: Checkpoint, tmp_path: Path) -> None:
    prefix = str(tmp_path / "other")
    fit(*(network(), loader(8, 4)), num_epoch=1, epoch_end_callback=callbacks.do_checkpoint(prefix))
    saved.worker(0).write_bytes(Checkpoint(prefix, 1).worker(0).read_bytes())
    with pytest.raises(kv.Mismatch, match=r"model-0001.worker.0: from another run than .*model-0001.safetensors"):
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
    with pytest.raises(CheckpointError, match=r"model-0001.safetensors: missing or damaged"):
        go_on(saved)


def test_another_number_of_workers_leaves_out_what_each_had(
    saved: Checkpoint, pair: ThreadedJob, caplog: pytest.LogCaptureFixture
) -> None:
    def work(store: kv.KVStore, reducer: Reducer) -> int:
        options = {"kvstore": store, "reducer": reducer, "num_epoch": 2, "optimizer_params": SGD}
        with pytest.raises(kv.Mismatch, match="saved within an epoch by 1 workers, but there are 2"):
            fit(network(), loader(8, 4, 2, store.rank), resume=Checkpoint(saved.prefix, 0, 1), **options)
        return 0

    assert run(pair, work) == [0, 0]

    def after(store: kv.KVStore, reducer: Reducer) -> int:
        options = {"kvstore": store, "reducer": reducer, "num_epoch": 2, "optimizer_params": SGD}
        return len(fit(network(), loader(8, 4, 2, store.rank), resume=saved, **options))

    assert run(pair, after) == [1, 1]
    assert "saved by 1 workers, but there are 2: each worker's own state is left out" in caplog.text


FIELDS = ["run", "samples", "random", "metric", "callbacks", "data"]


@pytest.mark.parametrize("value", ["nothing", None, -1, float("nan"), "x", [], [1], {}, {"0": 1}, True])
@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_is_missing_or_of_another_kind(saved: Checkpoint, field: str, value: Any) -> None:
    """Each is refused, or is one that may be there."""
    within = Checkpoint(saved.prefix, 0, 1)
    fine = {"callbacks": ({}, {"0": 1}), "data": (None,)}.get(field, ())

    def change(own: dict[str, Any], _: dict[str, torch.Tensor]) -> None:
        own[field] = value
        if value == "nothing":
            del own[field]

    rewrite(within.worker(0), change)
    if any(value is it or value == it for it in fine):
        go_on(within, num_epoch=1)
        return
    with pytest.raises(kv.UsageError):
        go_on(within, num_epoch=1)


@pytest.mark.parametrize("value", [float("nan"), None, -1, "2", [], True])
@pytest.mark.parametrize("field", ["num_workers", "run"])
def test_weights_that_do_not_say_whose_they_are(saved: Checkpoint, field: str, value: Any) -> None:
    rewrite(saved.weights, lambda about, _: about.update({field: value}))
    with pytest.raises(CheckpointError, match=rf"model-0001.safetensors: damaged: its {field} is .*, not a valid int"):
        go_on(saved)


def test_buffers_of_another_shape(saved: Checkpoint) -> None:
    rewrite(saved.worker(0), lambda _, tensors: tensors.update({"buffer/0.1.running_mean": torch.tensor(1.0)}))
    with pytest.raises(kv.Mismatch, match=r"worker.0: '0.1.running_mean' has shape \[\], but the model's has \[8\]"):
        go_on(saved)


CALLBACKS: dict[str, tuple[Any, list[Any]]] = {
    "EarlyStopping.0": (
        lambda: callbacks.EarlyStopping("accuracy"),
        [5, {}, *({"best": 1.0, "best_epoch": 0, "waited": 0} | odd for odd in ({"best": "x"}, {"waited": None}))],
    ),
    "TorchScheduler.0": (
        lambda: callbacks.TorchScheduler(lambda optimizer: StepLR(optimizer, 1)),
        [5, {}, {"bundle": 5}, {"bundle": "x"}, {"bundle": "kA=="}, {"bundle": "k6RsaXN0kaRkaWN0kaRkaWN0"}],
    ),
}


@pytest.mark.parametrize(("which", "odd"), [(which, odd) for which, (_, odds) in CALLBACKS.items() for odd in odds])
def test_what_callbacks_do_not_remember(saved: Checkpoint, which: str, odd: Any) -> None:
    rewrite(saved.worker(0), lambda own, _: own["callbacks"].update({which: odd}))
    with pytest.raises(kv.UsageError, match=r"damaged|the checkpoint's state does not fit this StepLR"):
        go_on(saved, eval_data=loader(8, 4), eval_end_callback=CALLBACKS[which][0]())


# ---- where a run is in its data


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
