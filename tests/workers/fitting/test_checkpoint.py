"""The files of a checkpoint of ``fit``, and several copies of a model."""

from __future__ import annotations

import json
import os
import pickle
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from fitted import CLASSES, FEATURES, SGD, go_on, loader, network, reducer_of, run, same_bits, samples, state
from odd_tensors import odd_tensors
from recorded import Recorded
from safetensors.torch import save_file
from threaded import ThreadedJob
from torch import nn
from torch.utils.data import TensorDataset

import kvstore as kv
import workers
from kvstore.checkpoint.folders import listed
from kvstore.checkpoint.manifest import load_manifest
from kvstore.client import DistStore
from kvstore.job.valid_values import Interval
from kvstore.member.session import Session
from kvstore.store.local import LocalStore
from workers import Checkpoint, CheckpointError, Reducer, callbacks, fit, schedules
from workers.common.tensors import fingerprint

# ---- the files of a checkpoint


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


# ---- ``fit`` in a job that saves checkpoints: a resumed job makes the rest of an epoch, to the bit

EPOCHS, EVERY = 3, 4


def training(store: kv.KVStore, reducer: Reducer, resume: Checkpoint | None = None) -> Any:
    """Three epochs of five batches on each of two workers."""
    model = network()
    halved = {**SGD, "lr_scheduler": schedules.FactorScheduler(3, 0.5, base_lr=0.1)}
    options = {"num_epoch": EPOCHS, "kvstore": store, "reducer": reducer, "optimizer_params": halved, "resume": resume}

    def wait(_: Any) -> None:
        store.save_checkpoint(if_due=True, wait=True)

    data = loader(20, 2, store.num_workers, store.rank)
    history = fit(model, data, batch_end_callback=wait, **options)
    return state(model), history


def job(directory: Path, program: Any = training, workers: int = 2, servers: int = 2, **more: Any) -> Any:
    options = {"checkpoint_dir": str(directory), "checkpoint_every": Interval(EVERY), "checkpoint_keep": 9, **more}
    with ThreadedJob(workers, servers, bigarray_bound=30, **options) as made:
        return run(made, program)


def test_a_resumed_job_makes_the_rest_of_the_epoch_to_the_bit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    undisturbed = job(tmp_path)
    folders = [folder.path for folder in listed(tmp_path)]
    rounds = {load_manifest(folder).rounds: folder for folder in folders}
    within = rounds[8]
    for servers in (1, 3):
        resumed = job(tmp_path / f"{servers}", servers=servers, checkpoint_resume=str(within))
        for (weights, history), (others, all_history) in zip(resumed, undisturbed, strict=True):
            assert same_bits(weights, others)
            assert history == all_history[1:]
    (alone,) = job(tmp_path / "alone", workers=1, checkpoint_resume=str(within))
    assert len(alone[1]) == 2
    assert "epoch 1 begins again" in caplog.text


def test_two_checkpoints_to_continue_from_are_one_too_many(tmp_path: Path) -> None:
    def both(store: kv.KVStore, reducer: Reducer) -> None:
        training(store, reducer)

    def again(store: kv.KVStore, reducer: Reducer) -> None:
        prefix = str(tmp_path / f"model-{store.rank}")
        Checkpoint(prefix, 1).save_weights(network(), {"epoch": 1, "batch": 0, "run": 1, "num_workers": 9})
        training(store, reducer, Checkpoint(prefix, 1))

    job(tmp_path, both, workers=1)
    with pytest.raises(kv.KVStoreError, match=r"resume=.* was passed, but the job was started with --resume|states"):
        job(tmp_path / "new", again, workers=1, checkpoint_resume=str(tmp_path))


# ---- fit with models that have tables: in a store, or of torch with sparse gradients

IDS = torch.randint(0, 50, (24, 3), generator=torch.Generator().manual_seed(0))
BATCHES = [(IDS[start : start + 8], IDS[start : start + 8].sum(1) % 2) for start in range(0, 24, 8)]


class Classifier(nn.Module):
    def __init__(self, store: Any, kind: str, rows: int | None = 50) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag: nn.Module
        if kind == "table":
            self.bag = workers.EmbeddingBag(rows, 4, store=store, key="bag", mode="sum")
        else:
            self.bag = nn.EmbeddingBag(50, 4, mode="sum", sparse=True)
        self.head = nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.bag(ids))
        return scores


def train(kind: str, epochs: int, rows: int | None = 50, lookahead: bool = False, **options: Any) -> Any:
    store = Recorded("adam")
    model = Classifier(store, kind, rows)
    data = workers.lookahead(BATCHES, {model.bag: lambda batch: batch[0]}) if lookahead else BATCHES
    fit(
        *(model, data, BATCHES),
        num_epoch=epochs,
        kvstore=store,
        optimizer="adam",
        optimizer_params={"learning_rate": 0.05},
        update_on_kvstore=True,
        **options,
    )
    return model.state_dict()


@pytest.mark.parametrize(("kind", "rows"), [("table", 50), ("table", None), ("parameter", 50)])
def test_a_run_goes_on_with_the_same_bits(kind: str, rows: int | None, tmp_path: Path) -> None:
    whole = train(kind, 4, rows)
    train(kind, 2, rows, epoch_end_callback=callbacks.do_checkpoint(str(tmp_path / "m")))
    resumed = train(kind, 4, rows, lookahead=kind == "table", resume=Checkpoint(str(tmp_path / "m"), 2))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_checkpoint_of_other_rows(tmp_path: Path) -> None:
    checkpoint = Checkpoint(str(tmp_path / "m"), 1)
    checkpoint.save_weights(Classifier(Recorded(), "table", 40))
    with pytest.raises(kv.Mismatch, match=r"table 'bag' at bag: its rows have the shape \(40, 4\)"):
        checkpoint.load_weights(Classifier(Recorded(), "table", 50))


def test_several_devices_are_refused() -> None:
    store = Recorded()
    with pytest.raises(kv.UsageError, match="one device per process"):
        fit(Classifier(store, "table"), BATCHES, num_epoch=1, kvstore=store, devices=["cpu", "cpu"])


def test_uneven_workers_with_tables_in_a_store_of_their_own(pair: ThreadedJob) -> None:
    def work(session: Session) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
        tables, store, sums = DistStore(session), DistStore(session), DistStore(session)
        tables.set_optimizer("adam", learning_rate=0.05)
        model = Classifier(tables, "table")
        data = BATCHES[: 1 + 2 * session.rank]
        history = fit(model, data, BATCHES, num_epoch=2, kvstore=store, reducer=reducer_of(sums))
        return model.state_dict(), history

    (one, history), (two, others) = pair.run_sessions(work)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert history == others


# ---- several copies of a model, each with a part of every batch


def test_several_inputs_by_place_and_by_name_and_another_loss() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.layer(a + b)[:, 0]

    pictures = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    wanted = pictures.sum(1)
    results = []
    for inputs in ((pictures, pictures), [pictures, pictures.numpy()], {"b": pictures, "a": pictures}):
        torch.manual_seed(0)
        history = fit(
            Sum(),
            [(inputs, wanted)],
            eval_metric="loss",
            loss=nn.functional.mse_loss,
            num_epoch=60,
            optimizer_params=SGD,
        )
        results.append([epoch["train-loss"] for epoch in history])
    assert results[0] == results[1] == results[2]
    assert results[0][-1] < 0.1 * results[0][0]


def test_the_mean_loss_counts_every_sample_the_same() -> None:
    model = nn.Linear(1, 1, bias=False)
    data = [(torch.tensor([[3.0], [3.0], [3.0]]), torch.zeros(3)), (torch.tensor([[1.0]]), torch.zeros(1))]
    history = fit(
        model,
        data,
        eval_metric="loss",
        loss=lambda output, label: (output * 0 + 1).mean() * (3.0 if len(label) == 3 else 7.0),
        num_epoch=1,
    )
    assert history == [{"train-loss": 4.0}]


@pytest.mark.parametrize("count", [16, 14])
def test_two_devices_do_as_one_with_the_same_batches(count: int) -> None:
    one, two = network(batch_norm=False), network(batch_norm=False)
    fit(one, loader(count, 6), num_epoch=2, optimizer_params=SGD)
    history = fit(
        two, loader(count, 6), loader(5, 5), devices=["cpu", "cpu"], kvstore="device", num_epoch=2, optimizer_params=SGD
    )
    for name, tensor in state(one).items():
        torch.testing.assert_close(state(two)[name], tensor, rtol=1e-5, atol=1e-6)
    assert set(history[0]) == {"train-accuracy", "validation-accuracy"}


@pytest.mark.parametrize("order", ["=", ">"])
def test_data_that_needs_no_loader(order: str) -> None:
    inputs, labels = (
        array.astype(array.dtype.newbyteorder(order))
        for array in (tensor.numpy() for tensor in TensorDataset(*samples(8).tensors).tensors)
    )
    history = fit(network(), [(inputs, labels)], num_epoch=1)
    assert set(history[0]) == {"train-accuracy"}


def test_fit_shows_its_passes_in_the_trace() -> None:
    class Noting(LocalStore):
        """A store that notes what is to be shown."""

        shown: ClassVar[list[str]] = []

        def traced(self, name: str) -> AbstractContextManager[None]:
            self.shown.append(name)
            return nullcontext()

    batch = (torch.randn(4, 2), torch.randn(4, 1))
    fit(nn.Linear(2, 1), [batch] * 2, num_epoch=1, eval_metric="loss", loss=nn.MSELoss(), kvstore=Noting("local"))
    assert Noting.shown == ["forward", "backward"] * 2


# ---- Buffers that are no ordinary arrays of floats, through a whole fit: first values, averages, checkpoints, devices

LOW = torch.finfo(torch.float32).min


class Odd(nn.Module):
    """A linear model with a frozen layer; its buffers change in no step, except for those of the norm."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.frozen, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)
        self.norm = nn.BatchNorm1d(FEATURES)
        with torch.no_grad():
            for param in self.parameters():
                param.fill_(0.1 + seed)
        self.frozen.requires_grad_(False)
        self.register_buffer("mask", torch.tensor([0.0, LOW, float("-inf")]))
        for name, tensor in odd_tensors(seed).items():
            self.register_buffer(name.replace(" ", "_").replace(",", ""), tensor)
        self.register_buffer("own", torch.arange(3) + seed, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.frozen(x)))  # type: ignore[no-any-return]


def prints(model: nn.Module) -> dict[str, int]:
    named = {**dict(model.named_buffers()), "frozen": model.frozen.weight}  # type: ignore[union-attr]
    return {name: fingerprint(tensor) for name, tensor in named.items() if not name.startswith("norm")}  # type: ignore[arg-type]


def test_every_worker_trains_with_rank_zeros_and_constants_stay(pair: ThreadedJob) -> None:
    def work(store: kv.KVStore, reducer: Reducer) -> None:
        model = Odd(store.rank)
        fit(model, loader(8, 4), num_epoch=2, kvstore=store, reducer=reducer, optimizer_params=SGD)
        assert prints(model) == prints(Odd(0))

    run(pair, work)


def test_with_diloco_too(pair: ThreadedJob) -> None:
    def work(store: kv.KVStore, reducer: Reducer) -> None:
        model = Odd(store.rank)
        how: dict[str, Any] = {"kvstore": store, "reducer": reducer, "optimizer_params": SGD}
        fit(model, loader(8, 4), num_epoch=2, diloco={"inner_steps": 2}, **how)
        assert prints(model) == prints(Odd(0))

    run(pair, work)


@pytest.mark.parametrize("kvstore", [None, "local"])
def test_one_process(kvstore: str | None) -> None:
    model = Odd(3)
    fit(model, loader(8, 4), loader(4, 4), num_epoch=1, kvstore=kvstore, optimizer_params=SGD)
    assert prints(model) == prints(Odd(3))


def test_several_devices() -> None:
    model = Odd(3)
    fit(model, loader(8, 4), num_epoch=1, kvstore="device", devices=["cpu", "cpu"], optimizer_params=SGD)
    assert prints(model) == prints(Odd(3))
    assert model.norm.running_mean is not None
    assert torch.isfinite(model.norm.running_mean).all()


def test_a_checkpoint_has_them(tmp_path: Path) -> None:
    prefix = str(tmp_path / "model")
    fit(*(Odd(3), loader(8, 4)), num_epoch=1, optimizer_params=SGD, epoch_end_callback=callbacks.do_checkpoint(prefix))
    again = Odd(0)
    fit(again, loader(8, 4), num_epoch=2, optimizer_params=SGD, resume=Checkpoint(prefix, 1))
    assert prints(again) == prints(Odd(3))
    alone = Odd(0)
    Checkpoint(prefix, 1).load_weights(alone)
    assert {name: value for name, value in prints(alone).items() if name != "own"} == {
        name: value for name, value in prints(Odd(3)).items() if name != "own"
    }
