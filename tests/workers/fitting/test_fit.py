"""fit: MXNet's lines and order, the numbers of a plain loop, workers with uneven shares, and what is refused."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from fitted import SGD, loader, network, plain, run, same_bits, samples, state
from threaded import ThreadedJob
from torch import nn
from torch.utils.data import DataLoader, Dataset

import kvstore as kv
from kvstore.client import DistStore
from workers import Reducer, callbacks, fit, metrics


@pytest.mark.parametrize("kvstore", ["local", None])
def test_a_plain_loop_ends_with_the_same_weights(kvstore: str | None) -> None:
    model = network()
    fit(model, loader(20, 4), kvstore=kvstore, optimizer_params=SGD, num_epoch=3)
    expected = state(plain(network(), loader(20, 4), 3))
    for name, tensor in state(model).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)


def test_the_labs_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    history = fit(
        network(),
        loader(20, 4),
        loader(10, 5),
        ["acc", metrics.TopKAccuracy(top_k=2)],
        optimizer_params=SGD,
        num_epoch=2,
        batch_end_callback=callbacks.Speedometer(4, 2),
    )
    lines = [re.sub(r"\d+\.\d+", "#", line) for line in caplog.messages]
    assert lines == [
        line
        for epoch in (0, 1)
        for line in (
            f"Epoch[{epoch}] Batch [2]\tSpeed: # samples/sec\taccuracy=#\ttop_k_accuracy_2=#",
            f"Epoch[{epoch}] Batch [4]\tSpeed: # samples/sec\taccuracy=#\ttop_k_accuracy_2=#",
            f"Epoch[{epoch}] Train-accuracy=#",
            f"Epoch[{epoch}] Train-top_k_accuracy_2=#",
            f"Epoch[{epoch}] Time cost=#",
            f"Epoch[{epoch}] Validation-accuracy=#",
            f"Epoch[{epoch}] Validation-top_k_accuracy_2=#",
        )
    ]
    assert [f"Epoch[1] Validation-accuracy={history[1]['validation-accuracy']:f}"] == caplog.messages[-2:-1]


def test_an_epoch_without_a_batch_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    fit(network(), loader(4, 4), num_epoch=1)
    assert "no batch" not in caplog.text
    fit(network(), [], num_epoch=1)
    assert "worker 0 had no batch in epoch 0: is its data empty" in caplog.text


def test_the_initializer_is_applied_before_training() -> None:
    model = network()
    fit(model, loader(4, 4), num_epoch=0, initializer=lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else 0)
    first = state(model)
    assert not torch.equal(first["0.weight"], state(network())["0.weight"])


def test_two_workers_do_as_one_with_the_joined_batches(cluster: ThreadedJob) -> None:
    def work(store: kv.KVStore, reducer: Reducer) -> Any:
        model = network(seed=store.rank, batch_norm=False)  # everybody starts with rank 0's
        mine = loader(40, 4, 2, store.rank, shuffle=False)
        history = fit(model, mine, mine, num_epoch=2, kvstore=store, reducer=reducer, optimizer_params=SGD)
        return state(model), history

    (first, history), (second, other) = run(cluster, work)
    assert same_bits(first, second)
    assert history == other
    inputs, labels = samples(40).tensors
    joined = [
        (
            torch.cat([inputs[i : i + 4], inputs[20 + i : 24 + i]]),
            torch.cat([labels[i : i + 4], labels[20 + i : 24 + i]]),
        )
        for i in range(0, 20, 4)
    ]
    alone = network(seed=0, batch_norm=False)
    expected = fit(alone, joined, joined, num_epoch=2, optimizer_params=SGD)
    for name, tensor in state(alone).items():
        torch.testing.assert_close(first[name], tensor, rtol=1e-5, atol=1e-6)
    assert history == expected


class Broken(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(6), torch.tensor(0), torch.tensor(0)


def test_what_cannot_be_is_an_error_that_says_why() -> None:
    model = network()
    with pytest.raises(kv.UsageError, match="num_epoch=None must be an integer, at least 0"):
        fit(model, loader(8, 4), num_epoch=None)  # type: ignore[arg-type]
    with pytest.raises(kv.UsageError, match="a batch must be a pair of inputs and labels, not 3 things"):
        fit(model, DataLoader(Broken(), 2), num_epoch=1)
    with pytest.raises(kv.UsageError, match="a batch must be a pair of inputs and labels, not Tensor"):
        fit(model, torch.zeros(3, 6), num_epoch=1)
    with pytest.raises(
        kv.UsageError, match=r"the loss of a batch must be a scalar, the mean over samples, not of shape \[4\]"
    ):
        fit(model, loader(8, 4), num_epoch=1, loss=nn.CrossEntropyLoss(reduction="none"))
    with pytest.raises(kv.UsageError, match="train_data is an iterator, which ends after one epoch"):
        fit(model, iter(list(loader(8, 4))), num_epoch=2)
    with pytest.raises(kv.UsageError, match="a batch of 1 samples cannot be split over 2 devices"):
        fit(model, loader(5, 4), num_epoch=1, devices=["cpu", "cpu"], kvstore="device")
    with pytest.raises(kv.UnknownName, match="no metric 'f2'"):
        fit(model, loader(8, 4), eval_metric="f2", num_epoch=1)
    for name in ("arg_params", "params"):
        with pytest.raises(kv.UnknownName, match=rf"fit has no argument '{name}'; choose from .*overlap, .*resume"):
            fit(model, loader(8, 4), num_epoch=1, **{name: {}})
    with pytest.raises(kv.UsageError, match=r"resume='model' must be a workers\.Checkpoint\(prefix, epoch\)"):
        fit(model, loader(8, 4), num_epoch=1, resume="model")  # type: ignore[arg-type]


def broken(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss that has a gradient of NaNs."""
    return nn.functional.cross_entropy(outputs, labels) * float("nan")


@pytest.mark.parametrize("kvstore", ["local", None])
def test_a_gradient_that_is_not_finite_ends_it_by_name(kvstore: str | None) -> None:
    options = {"kvstore": kvstore, "optimizer_params": SGD, "num_epoch": 1, "loss": broken}
    with pytest.raises(kv.NotFinite, match=r"has NaN or infinite elements in update 1, which has not been made"):
        fit(network(), loader(8, 4), **options)
    model = network()
    fit(model, loader(8, 4), **options, check_finite=False)
    assert any(parameter.isnan().any() for parameter in model.parameters())


def test_a_gradient_that_is_not_finite_ends_it_on_all_workers(cluster: ThreadedJob) -> None:
    def work(store: DistStore, reducer: Reducer) -> None:
        loss = broken if store.rank else nn.functional.cross_entropy
        with pytest.raises(kv.NotFinite, match=r"push 1 of .* by worker 1 has NaN or infinite elements"):
            fit(network(), loader(8, 4), kvstore=store, reducer=reducer, num_epoch=1, loss=loss)

    run(cluster, work, finite=True)
