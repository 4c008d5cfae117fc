"""Trainer: steps, alone, on several devices and on several workers, and what a step refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from threaded import ThreadedJob
from torch import nn
from trained import HOWS, backward, batch, network, on_devices, plain_run, same, weights

import kvstore as kv
from kvstore.client import DistStore
from workers import Trainer


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_alone_it_is_torch_optim(how: dict[str, Any]) -> None:
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    model = network()
    trainer = Trainer(model.named_parameters(), "sgd", options, **how)
    for step in range(5):
        backward(model, *batch(step))
        trainer.step()
    same(model, plain_run(5, **options))


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_a_batch_size_divides_the_gradient_of_a_sum(how: dict[str, Any]) -> None:
    model = network()
    trainer = Trainer(model.parameters(), "sgd", {"learning_rate": 0.1}, **how)
    for step in range(3):
        backward(model, *batch(step), reduction="sum")
        trainer.step(12)
    same(model, plain_run(3, lr=0.1))


@pytest.mark.parametrize("how", HOWS[1:], ids=str)
def test_two_devices_do_as_one_with_both_batches(how: dict[str, Any]) -> None:
    models = [network(0), network(1)]
    options = {"lr": 0.1, "momentum": 0.9}
    trainer = Trainer([model.named_parameters() for model in models], "sgd", options, **how)
    same(*models, atol=0)  # the first one's weights count
    for step in range(4):
        data, labels = batch(step)
        for model, part in zip(models, (slice(0, 6), slice(6, 12)), strict=True):
            backward(model, data[part], labels[part])
        trainer.step()
        same(*models, atol=0)
    same(models[0], plain_run(4, **options))


@pytest.mark.parametrize("update_on_kvstore", [True, False])
def test_gluon_step_on_several_workers(pair: ThreadedJob, update_on_kvstore: bool) -> None:
    """MXNet's nightly test: every worker's gradient is its rank + 1, so w == 1 - n(n+1)/2."""

    def work(store: DistStore) -> list[float]:
        (param,) = weights(1.0)
        trainer = Trainer({"w": param}, "sgd", {"learning_rate": 1.0}, store, update_on_kvstore)
        param.grad = torch.full((2,), store.rank + 1.0)
        trainer.step(1)
        return param.tolist()

    assert pair.run(work) == [[-2.0, -2.0]] * 2


def test_an_async_store_updates_for_every_worker(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> list[float]:
        (param,) = weights(1.0)
        trainer = Trainer({"w": param}, "sgd", {"learning_rate": 1.0}, store)
        param.grad = torch.full((2,), store.rank + 1.0)
        trainer.step(1)
        store.barrier()
        param.grad = torch.zeros(2)
        trainer.step(1)
        return param.tolist()

    assert pair.run(work, mode="async") == [[-2.0, -2.0]] * 2


def test_gluons_own_numbers_on_two_devices() -> None:
    """MXNet's test_trainer: gradients of one on two devices, lr 1, momentum 0.5."""
    params = weights(0.0, 0.0)
    trainer = Trainer(on_devices(params), "sgd", {"learning_rate": 1.0, "momentum": 0.5})
    for expected in (-2, -5):
        for param in params:
            param.grad = torch.ones(2)
        trainer.step(1)
        assert [param.tolist() for param in params] == [[expected] * 2] * 2


def test_allreduce_grads_and_then_update() -> None:
    params = weights(0.0, 0.0)
    trainer = Trainer(on_devices(params), "sgd", {"learning_rate": 1.0}, "device", update_on_kvstore=False)
    for i, param in enumerate(params):
        param.grad = torch.full((2,), float(i))
    trainer.allreduce_grads()
    assert [param.grad.tolist() for param in params if param.grad is not None] == [[1, 1], [1, 1]]
    for param in params:
        assert param.grad is not None
        param.grad.clamp_(max=0.5)
    trainer.update(1)
    assert [param.tolist() for param in params] == [[-0.5, -0.5]] * 2


def test_without_a_store_there_is_nothing_to_sum() -> None:
    (param,) = weights(0.0)
    trainer = Trainer([param], "sgd", {"learning_rate": 1.0}, None)
    param.grad = torch.ones(2)
    trainer.allreduce_grads()
    trainer.update()
    assert param.tolist() == [-1, -1]


def test_on_the_store_the_two_halves_of_a_step_are_one() -> None:
    trainer = Trainer(on_devices(weights(0.0, 0.0)), "sgd")
    with pytest.raises(kv.UsageError, match=r"allreduce_grads\(\) is for update_on_kvstore=False"):
        trainer.allreduce_grads()
    with pytest.raises(kv.UsageError, match=r"update\(\) is for update_on_kvstore=False"):
        trainer.update(1)


def test_zero_grad() -> None:
    params = weights(0.0, 0.0)
    trainer = Trainer(on_devices(params), "sgd")
    for param in params:
        param.grad = torch.ones(2)
    trainer.optimizer.zero_grad(set_to_none=False)
    assert [param.grad.tolist() for param in params if param.grad is not None] == [[0, 0]] * 2
    trainer.zero_grad()
    assert [param.grad for param in params] == [None, None]


def test_a_parameter_without_a_gradient() -> None:
    params = {"used": nn.Parameter(torch.zeros(1)), "unused": nn.Parameter(torch.zeros(1))}
    for how in HOWS:
        trainer = Trainer(params, "sgd", **how)
        params["used"].grad = torch.ones(1)
        with pytest.raises(kv.UsageError, match=r"'unused' has no gradient: call backward\(\) before step\(\)"):
            trainer.step()
        assert params["used"].item() == 0


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_size_is_positive(batch_size: int) -> None:
    (param,) = weights(0.0)
    trainer = Trainer([param], "sgd")
    param.grad = torch.ones(2)
    with pytest.raises(kv.UsageError, match="must be positive"):
        trainer.step(batch_size)
    assert param.tolist() == [0, 0]


def test_workers_with_different_batch_sizes_are_told(pair: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        (param,) = weights(0.0)
        trainer = Trainer({"w": param}, "sgd", None, store)
        param.grad = torch.ones(2)
        with pytest.raises(kv.Mismatch, match=r"disagree on the rescale_grad .*'w': 1 on worker 0, 0\.5 on worker 1"):
            trainer.step(1 + store.rank)

    pair.run(work)
