"""Several copies of a model, each with a part of every batch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from fitted import CLASSES, FEATURES, SGD, loader, network, run, samples, state
from odd_tensors import odd_tensors
from threaded import ThreadedJob
from torch import nn
from torch.utils.data import TensorDataset

import kvstore as kv
from kvstore.store.local import LocalStore
from workers import Checkpoint, Reducer, callbacks, fit
from workers.common.tensors import fingerprint


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
    fit(
        *(Odd(3), loader(8, 4)),
        num_epoch=1,
        optimizer_params=SGD,
        epoch_end_callback=callbacks.do_checkpoint(prefix),
    )
    again = Odd(0)
    fit(again, loader(8, 4), num_epoch=2, optimizer_params=SGD, resume=Checkpoint(prefix, 1))
    assert prints(again) == prints(Odd(3))
    alone = Odd(0)
    Checkpoint(prefix, 1).load_weights(alone)
    assert {name: value for name, value in prints(alone).items() if name != "own"} == {
        name: value for name, value in prints(Odd(3)).items() if name != "own"
    }
