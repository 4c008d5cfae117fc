"""A Trainer as torch's schedulers and GradScaler know an optimizer."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from joined import BOTH, SGD, close, half, loss_of, network, run
from threaded import ThreadedJob
from torch import nn
from torch.optim import lr_scheduler

import kvstore as kv
from kvstore.client import DistStore
from workers import DistributedOptimizer, Trainer

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda its: lr_scheduler.StepLR(its, 3, 0.5),
    "LambdaLR": lambda its: lr_scheduler.LambdaLR(its, lambda epoch: 1 / (1 + epoch)),
    "CosineAnnealingWarmRestarts": lambda its: lr_scheduler.CosineAnnealingWarmRestarts(its, 4),
    "OneCycleLR": lambda its: lr_scheduler.OneCycleLR(its, 0.2, total_steps=12),
    "CyclicLR": lambda its: lr_scheduler.CyclicLR(its, 0.01, 0.1, 4),
    "SequentialLR": lambda its: lr_scheduler.SequentialLR(
        its, [lr_scheduler.LinearLR(its, 0.1, 1.0, 4), lr_scheduler.ExponentialLR(its, 0.8)], [4]
    ),
    "ReduceLROnPlateau": lambda its: lr_scheduler.ReduceLROnPlateau(its, patience=1),
}


def scheduled(scheduler: Any, step: int) -> None:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(float(step))
    else:
        scheduler.step()


@BOTH
@pytest.mark.parametrize(("name", "groups"), [*((name, True) for name in SCHEDULERS), ("StepLR", False)])
@pytest.mark.filterwarnings("ignore:The epoch parameter in .scheduler.step")  # torch 2.5's SequentialLR, in itself
def test_torchs_schedulers(pair: ThreadedJob, name: str, groups: bool, update_on_kvstore: bool) -> None:
    def given(model: nn.Module) -> Any:
        params = list(model.parameters())
        return [{"params": params[:2]}, {"params": params[2:], "lr": 0.02}] if groups else params

    def work(model: nn.Module, store: DistStore) -> None:
        trainer = Trainer(given(model), "sgd", SGD, store, update_on_kvstore)
        scheduler = SCHEDULERS[name](trainer.optimizer)
        for step in range(10):
            trainer.zero_grad()
            loss_of(model, step, half(store)).backward()
            trainer.step()
            scheduled(scheduler, step)

    theirs = network()
    optimizer = torch.optim.SGD(given(theirs), **SGD)
    scheduler = SCHEDULERS[name](optimizer)
    for step in range(10):
        optimizer.zero_grad()
        loss_of(theirs, step).backward()
        optimizer.step()
        scheduled(scheduler, step)
    close(run(pair, work), theirs)


def test_betas_cycle_on_the_servers(pair: ThreadedJob) -> None:
    def stepped(optimizer: Any, model: nn.Module, part: slice) -> None:
        scheduler = lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=12)
        for step in range(10):
            optimizer.zero_grad()
            loss_of(model, step, part).backward()
            optimizer.step()
            scheduler.step()

    def work(model: nn.Module, store: DistStore) -> None:
        stepped(Trainer(model.parameters(), "adam", {"lr": 0.1}, store).optimizer, model, half(store))

    theirs = network()
    stepped(torch.optim.Adam(theirs.parameters(), lr=0.1), theirs, slice(0, 12))
    close(run(pair, work), theirs)


def test_a_scheduler_goes_on_from_its_state_and_the_trainers(tmp_path: Path) -> None:
    param = nn.Parameter(torch.zeros(1))
    first = Trainer([param], "sgd", {"lr": 1.0})
    scheduler = lr_scheduler.StepLR(first.optimizer, 1, 0.5)
    param.grad = torch.ones(1)
    first.optimizer.step()
    scheduler.step()
    second = Trainer([param], "sgd", {"lr": 1.0})
    resumed = lr_scheduler.StepLR(second.optimizer, 1, 0.5)
    resumed.load_state_dict(scheduler.state_dict())
    first.save_states(tmp_path / "states")
    second.load_states(tmp_path / "states")
    assert second.learning_rate == 0.5
    second.step()
    resumed.step()
    assert (first.learning_rate, second.learning_rate) == (0.5, 0.25)


def test_a_momentum_out_of_nothing_is_an_error() -> None:
    param = nn.Parameter(torch.zeros(1))
    trainer = Trainer([param], "sgd", {"lr": 1.0}, "device", True)
    lr_scheduler.OneCycleLR(trainer.optimizer, 1.0, total_steps=10)
    param.grad = torch.ones(1)
    with pytest.raises(
        kv.UsageError, match=r"momentum cannot become 0\.95 from 0.*give the optimizer one from the start"
    ):
        trainer.step()


def test_what_the_optimizer_of_a_trainer_is() -> None:
    param = nn.Parameter(torch.zeros(1))
    trainer = Trainer([param], "adamw", {"lr": 0.5})
    optimizer = trainer.optimizer
    assert optimizer is trainer.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups[0]["params"] == [param]
    assert {"lr", "betas", "weight_decay"} <= optimizer.defaults.keys()
    with pytest.raises(kv.UsageError, match="make another Trainer"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})

    def closure() -> float:
        param.grad = torch.ones(1)
        return 7.0

    assert optimizer.step(closure) == 7.0
    assert param.item() != 0
    optimizer.zero_grad()
    assert param.grad is None


@BOTH
@pytest.mark.parametrize("unscale", [False, True], ids=["in step", "before"])
def test_when_one_worker_overflows_all_skip(pair: ThreadedJob, unscale: bool, update_on_kvstore: bool) -> None:
    def work(model: nn.Module, store: DistStore) -> None:
        trainer = Trainer(model.named_parameters(), "sgd", SGD, store, update_on_kvstore)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(6):
            trainer.zero_grad()
            scaler.scale(loss_of(model, step, half(store))).backward()
            if step in (0, 3) and store.rank == 1:
                next(model.parameters()).grad[0, 0] = float("inf")  # type: ignore[index]
            if unscale:
                scaler.unscale_(trainer.optimizer)
                trainer.clip_grad_norm_(0.5)
            scaler.step(trainer.optimizer)
            scaler.update()

    theirs = network()
    optimizer = torch.optim.SGD(theirs.parameters(), **SGD)
    for step in (1, 2, 4, 5):
        optimizer.zero_grad()
        loss_of(theirs, step).backward()
        if unscale:
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()
    close(run(pair, work), theirs)


def made(update_on_kvstore: bool) -> tuple[nn.Module, Trainer]:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.arange(6.0).reshape(2, 3))
        model.bias.zero_()
    how = {"kvstore": "local", "update_on_kvstore": update_on_kvstore}
    return model, Trainer(model.named_parameters(), "adam", {"learning_rate": 0.1}, **how)


def trained_to(model: nn.Module, trainer: Trainer, steps: range) -> nn.Module:
    for step in steps:
        model(torch.sin(torch.arange(6.0) * (1 + step)).reshape(2, 3)).square().sum().backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    return model


@pytest.mark.parametrize("update_on_kvstore", [True, False])
def test_a_state_dict_goes_on_with_the_same_bits(update_on_kvstore: bool, tmp_path: Path) -> None:
    whole = trained_to(*made(update_on_kvstore), range(5))
    model, trainer = made(update_on_kvstore)
    trainer.optimizer.load_state_dict(trainer.optimizer.state_dict())  # before the first step, as accelerate's prepare
    trained_to(model, trainer, range(3))
    trainer.optimizer.param_groups[0]["lr"] = 0.1
    torch.save({"model": model.state_dict(), "optimizer": trainer.optimizer.state_dict()}, tmp_path / "saved.pt")

    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    again = nn.Linear(3, 2)
    again.load_state_dict(saved["model"])
    resumed = Trainer(
        again.named_parameters(), "adam", {"lr": 7.0}, kvstore="local", update_on_kvstore=update_on_kvstore
    )
    resumed.optimizer.load_state_dict(saved["optimizer"])
    assert resumed.num_update == 3
    assert resumed.optimizer.param_groups[0]["lr"] == 0.1
    trained_to(again, resumed, range(3, 5))
    assert torch.equal(again.weight, whole.weight)


@pytest.mark.parametrize("other", [{}, {"state": {}, "param_groups": []}, {"state": {0: {"step": torch.ones(1)}}}])
def test_the_state_of_another_optimizer_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(kv.UsageError, match=r"no state of a Trainer's optimizer: pass what trainer\.optimizer"):
        made(True)[1].optimizer.load_state_dict(other)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_belongs_to_a_process_is_not_copied(copied: Callable[[Any], Any]) -> None:
    model, trainer = made(True)
    averaging = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, kvstore="local")
    for thing in (trainer, trainer.optimizer, trainer.store, averaging):
        with pytest.raises(kv.Unsupported, match=r"cannot be copied or pickled: .*[mM]ake another"):
            copied(thing)
    assert torch.equal(copy.deepcopy(model).weight, model.weight)
