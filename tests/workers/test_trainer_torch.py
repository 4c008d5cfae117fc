"""What torch users bring to a Trainer: schedulers, GradScaler, clipping, accumulation, tied and unused weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from threaded import ThreadedJob
from torch import nn
from torch.optim import lr_scheduler

import kvstore as kv
from kvstore.dist import DistStore
from workers import Trainer

BOTH = pytest.mark.parametrize("update_on_kvstore", [True, False], ids=["on the servers", "in the workers"])
SGD = {"lr": 0.1, "momentum": 0.9}


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThreadedJob]:
    with ThreadedJob(workers=2, servers=2, bigarray_bound=30) as cluster:
        yield cluster


def network() -> nn.Module:
    made = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(0)
    for param in made.parameters():
        param.data = torch.randn(param.shape, generator=generator) / 3
    return made


def loss_of(model: nn.Module, step: int, part: slice = slice(0, 12)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    data, labels = torch.randn(12, 6, generator=generator), torch.randint(3, (12,), generator=generator)
    return nn.functional.cross_entropy(model(data[part]), labels[part])


def half(store: Any) -> slice:
    return slice(6 * store.rank, 6 * store.rank + 6)


def close(one: nn.Module, two: nn.Module, atol: float = 1e-5) -> None:
    for ours, theirs in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


def run(cluster: ThreadedJob, work: Callable[[nn.Module, DistStore], None]) -> nn.Module:
    models = [network() for _ in range(2)]
    cluster.run(lambda store: work(models[store.rank], store))
    close(*models, atol=0)
    return models[0]


# ---- schedulers

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
@pytest.mark.parametrize("groups", [False, True], ids=["one group", "two groups"])
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:The epoch parameter in .scheduler.step")  # torch 2.5's SequentialLR, in itself
def test_torchs_schedulers(cluster: ThreadedJob, name: str, groups: bool, update_on_kvstore: bool) -> None:
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
    close(run(cluster, work), theirs)


def test_betas_cycle_on_the_servers(cluster: ThreadedJob) -> None:
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
    close(run(cluster, work), theirs)


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
    for call in (optimizer.state_dict, lambda: optimizer.load_state_dict({})):
        with pytest.raises(kv.UsageError, match=r"trainer\.(save|load)_states"):
            call()
    with pytest.raises(kv.UsageError, match="make another Trainer"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})

    def closure() -> float:
        param.grad = torch.ones(1)
        return 7.0

    assert optimizer.step(closure) == 7.0
    assert param.item() != 0
    optimizer.zero_grad()
    assert param.grad is None


# ---- GradScaler


@BOTH
@pytest.mark.parametrize("unscale", [False, True], ids=["in step", "before"])
def test_when_one_worker_overflows_all_skip(cluster: ThreadedJob, unscale: bool, update_on_kvstore: bool) -> None:
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
    close(run(cluster, work), theirs)


# ---- clipping and accumulation


@BOTH
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_is_torchs_on_the_joined_batch(
    cluster: ThreadedJob, norm_type: float, update_on_kvstore: bool
) -> None:
    norms: list[float] = []

    def work(model: nn.Module, store: DistStore) -> None:
        trainer = Trainer(model.named_parameters(), "sgd", SGD, store, update_on_kvstore)
        for step in range(6):
            trainer.zero_grad()
            loss_of(model, step, half(store)).backward()
            norm = trainer.clip_grad_norm_(0.3, norm_type)
            if store.rank == 0:
                norms.append(norm.item())
            trainer.step()

    theirs, expected = network(), []
    optimizer = torch.optim.SGD(theirs.parameters(), **SGD)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(theirs, step).backward()
        expected.append(torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.3, norm_type).item())
        optimizer.step()
    close(run(cluster, work), theirs)
    assert norms == pytest.approx(expected, rel=1e-4)
    assert max(norms) > 0.3


def test_clipping_between_allreduce_and_update(cluster: ThreadedJob) -> None:
    def work(model: nn.Module, store: DistStore) -> None:
        trainer = Trainer(model.named_parameters(), "sgd", {"lr": 0.1}, store, update_on_kvstore=False)
        for step in range(3):
            trainer.zero_grad()
            loss_of(model, step, half(store)).backward()
            trainer.allreduce_grads()
            pushed = store.statistics().pushes
            trainer.clip_grad_norm_(0.3)
            assert store.statistics().pushes == pushed
            trainer.update()
        trainer.zero_grad()
        loss_of(model, 3, half(store)).backward()
        trainer.allreduce_grads()
        next(model.parameters()).grad.mul_(2)  # type: ignore[union-attr]
        with pytest.raises(kv.UsageError, match="gradients have changed since allreduce_grads"):
            trainer.clip_grad_norm_(0.3)

    theirs = network()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(theirs, step).backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.3)
        optimizer.step()
    close(run(cluster, work), theirs)


def test_where_every_push_is_an_update_a_worker_clips_and_skips_alone(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> float:
        param = nn.Parameter(torch.zeros(1))
        trainer = Trainer({"w": param}, "sgd", {"lr": 1.0}, store)
        param.grad = torch.full((1,), 4.0 * (1 - store.rank))
        norm = trainer.clip_grad_norm_(1.0, batch_size=1)
        assert norm.item() == 4.0 * (1 - store.rank)
        if not trainer.overflows(store.rank == 1):
            trainer.step(1)
        store.barrier()
        store.pull("w", param)
        return param.item()

    assert cluster.run(work, mode="async") == pytest.approx([-1, -1], abs=1e-5)


@BOTH
def test_gradients_accumulate(cluster: ThreadedJob, update_on_kvstore: bool) -> None:
    def work(model: nn.Module, store: DistStore) -> None:
        trainer = Trainer(model.named_parameters(), "sgd", SGD, store, update_on_kvstore)
        first, middle = 6 * store.rank, 6 * store.rank + 3
        for step in range(4):
            trainer.zero_grad()
            with trainer.no_sync():
                (loss_of(model, step, slice(first, middle)) / 2).backward()
            (loss_of(model, step, slice(middle, middle + 3)) / 2).backward()
            trainer.step()

    theirs = network()
    optimizer = torch.optim.SGD(theirs.parameters(), **SGD)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(theirs, step).backward()
        optimizer.step()
    close(run(cluster, work), theirs)


# ---- tied, frozen and unused weights


@BOTH
def test_tied_weights_are_one_key_under_both_names(cluster: ThreadedJob, update_on_kvstore: bool) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.two.weight = self.one.weight
            nn.init.eye_(self.one.weight)

    models = [Tied(), Tied()]

    def work(store: DistStore) -> int:
        model = models[store.rank]
        named = model.named_parameters(remove_duplicate=False)
        options = {"lr": 1.0, "lr_mult": {"two.weight": 0.5}}
        trainer = Trainer(named, "sgd", options, store, update_on_kvstore)
        model.two(model.one(torch.ones(3))).sum().backward()
        trainer.step(2)
        return store.statistics().keys

    assert cluster.run(work) == [1, 1]
    assert torch.allclose(models[0].one.weight, torch.eye(3) - 0.5 * 2)
    assert models[1].two.weight is models[1].one.weight


@BOTH
@pytest.mark.parametrize("overlap", [False, True])
def test_weights_without_a_gradient_are_left_out_by_agreement(
    cluster: ThreadedJob, update_on_kvstore: bool, overlap: bool
) -> None:
    """``both`` has gradients everywhere, ``one`` on worker 0 in every other step, ``none`` nowhere."""
    size = 1 << 18  # more than one bucket

    def work(store: DistStore) -> dict[str, float]:
        params = {name: nn.Parameter(torch.ones(size)) for name in ("none", "one", "both")}
        options = {"lr": 1.0, "wd": 0.5}
        trainer = Trainer(params, "sgd", options, store, update_on_kvstore, overlap=overlap)
        for step in range(3):
            trainer.zero_grad()
            used = params["both"] * 0.5
            if store.rank == 0 and step != 1:
                used = used + params["one"] * 2
            used.sum().backward()
            trainer.step(2, ignore_stale_grad=True)
        return {name: param[-1].item() for name, param in params.items()}

    one = 1.0
    for _ in range(2):
        one -= 2 / 2 + 0.5 * one
    both = 1.0
    for _ in range(3):
        both -= 0.5 + 0.5 * both
    assert cluster.run(work) == [{"none": 1.0, "one": one, "both": both}] * 2


def test_where_every_push_is_an_update_a_weight_left_out_is_read_all_the_same(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> float:
        params = {name: nn.Parameter(torch.ones(1)) for name in ("a", "b")}
        trainer = Trainer(params, "sgd", {"lr": 1.0}, store)
        for mine in (0, 1):
            if store.rank == mine:
                params["a"].grad = torch.ones(1)
                if store.rank == 0:
                    params["b"].grad = torch.ones(1)
                trainer.step(1, ignore_stale_grad=True)
            store.barrier()
        return params["b"].item()

    assert cluster.run(work, mode="async") == [0, 0]


@pytest.mark.parametrize("how", [{"kvstore": None}, {"kvstore": "device", "update_on_kvstore": True}], ids=str)
def test_alone_too(how: dict[str, Any]) -> None:
    params = {name: nn.Parameter(torch.ones(1)) for name in ("used", "unused", "frozen")}
    params["frozen"].requires_grad_(False)
    trainer = Trainer(params, "sgd", {"lr": 1.0, "wd": 0.5}, **how)
    params["used"].grad = torch.ones(1)
    with pytest.raises(kv.UsageError, match=r"'unused' has no gradient.*ignore_stale_grad=True"):
        trainer.step()
    trainer.step(ignore_stale_grad=True)
    assert {name: param.item() for name, param in params.items()} == {"used": -0.5, "unused": 1, "frozen": 1}
    params["used"].grad = None
    trainer.step(ignore_stale_grad=True)
    assert params["used"].item() == -0.5
