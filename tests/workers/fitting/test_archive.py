"""A run that was interrupted ends with the bits of one that was not; what does not fit together is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from damaged import rewrite
from fitted import SGD, go_on, loader, network, run, same_bits, state
from threaded import ThreadedJob
from torch.optim.lr_scheduler import (
    StepLR,
)

import kvstore as kv
from workers import Checkpoint, CheckpointError, Reducer, callbacks, fit, schedules

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
def test_two_workers_go_on_to_the_bit(pair: ThreadedJob, tmp_path: Path, how: str, epoch: int, batch: int) -> None:
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

    whole = run(pair, work)
    resumed = run(pair, lambda *stores: work(*stores, resume=Checkpoint(prefix, epoch, batch)))
    for (first, history), (second, later) in zip(whole, resumed, strict=True):
        assert same_bits(first, second)
        assert history[epoch:] == later
    names = {path.name for path in tmp_path.iterdir() if f"model-{epoch:04d}." in path.name}
    if not batch:
        expected = {"safetensors", "states", "worker.0", "worker.1"} | ({"states.1"} if how == "2bit" else set())
        assert names == {f"model-000{epoch}.{kind}" for kind in expected}


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
