"""What workers ask each other before a step: which parameters are left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from joined import BOTH, SGD, close, half, loss_of, network, run
from threaded import ThreadedJob
from torch import nn

import kvstore as kv
from kvstore.client import DistStore
from workers import Trainer


@BOTH
@pytest.mark.parametrize("overlap", [False, True])
def test_weights_without_a_gradient_are_left_out_by_agreement(
    pair: ThreadedJob, update_on_kvstore: bool, overlap: bool
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
    assert pair.run(work) == [{"none": 1.0, "one": one, "both": both}] * 2


def test_where_every_push_is_an_update_a_weight_left_out_is_read_all_the_same(pair: ThreadedJob) -> None:
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

    assert pair.run(work, mode="async") == [0, 0]


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


# ---- Clipping by the norm of the gradient that all workers have together


@BOTH
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_is_torchs_on_the_joined_batch(pair: ThreadedJob, norm_type: float, update_on_kvstore: bool) -> None:
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
    close(run(pair, work), theirs)
    assert norms == pytest.approx(expected, rel=1e-4)
    assert max(norms) > 0.3


def test_clipping_between_allreduce_and_update(pair: ThreadedJob) -> None:
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
    close(run(pair, work), theirs)


def test_where_every_push_is_an_update_a_worker_clips_and_skips_alone(pair: ThreadedJob) -> None:
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

    assert pair.run(work, mode="async") == pytest.approx([-1, -1], abs=1e-5)
