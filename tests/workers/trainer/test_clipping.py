"""Clipping by the norm of the gradient that all workers have together."""

from __future__ import annotations

import pytest
import torch
from joined import BOTH, SGD, close, half, loss_of, network, run
from threaded import ThreadedJob
from torch import nn

import kvstore as kv
from kvstore.client import DistStore
from workers import Trainer


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
