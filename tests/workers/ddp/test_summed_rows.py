"""Sparse gradients of two workers with a DistributedOptimizer, against the optimizer itself with all samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from averaged import alone, batch, pair, same
from threaded import ThreadedJob
from torch import nn

from workers.alike import Alike
from workers.ddp.averager import GradientAverager, counts_of


def embedding() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2), nn.Embedding(9, 4, sparse=True))


def two_rates(params: Any) -> torch.optim.Optimizer:
    table, *rest = params
    return torch.optim.SGD([{"params": [table], "lr": 0.5}, {"params": rest}], lr=0.3)


def look_up(model: Any, optimizer: Any, step: int, rank: int | None) -> None:
    optimizer.zero_grad()
    ids = batch(step, rank)[1]
    hidden = model[0](ids + 4 * step)
    if step:  # the second table has no gradient in the first step
        hidden = hidden + model[2](ids)
    model[1](hidden).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("options", [{}, {"sparse_as_dense": True}, {"overlap": False}])
def test_as_the_optimizer_alone(cluster: ThreadedJob, options: dict[str, Any]) -> None:
    same(pair(cluster, look_up, two_rates, embedding, **options)[0], alone(look_up, two_rates, embedding))


def test_sparse_adam(cluster: ThreadedJob) -> None:
    def only(model: Any, optimizer: Any, step: int, rank: int | None) -> None:
        optimizer.zero_grad()
        model(batch(step, rank)[1]).square().mean().backward()
        optimizer.step()

    def table() -> nn.Module:
        torch.manual_seed(0)
        return nn.Embedding(5, 4, sparse=True)

    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(params, lr=0.1)

    same(pair(cluster, only, make, table)[0], alone(only, make, table))


def test_a_gradient_that_only_one_worker_has(cluster: ThreadedJob) -> None:
    def work(store: Any) -> list[Any]:
        model = embedding()
        params = dict(model.named_parameters())
        used = "/used"
        values = {name: param.detach() for name, param in params.items()}
        store.init([*values, used], [*values.values(), counts_of(len(params))])
        alike = Alike(torch.optim.SGD(params.values(), lr=1), store, "test")
        how: Any = {"average": False, "passes": 1, "sparse_as_dense": False, "overlap": True}
        averager = GradientAverager(params, store, used, alike, {*values, used}, **how)
        seen: list[Any] = []
        for reached in (store.rank == 1, True, False):
            model.zero_grad()
            averager.step_over()
            loss = model[1](torch.ones(4)).sum()
            if reached:
                loss = loss + model[0](torch.tensor([3 + store.rank, 3])).sum()
            loss.backward()
            grad = model[0].weight.grad
            seen.append(None if grad is None else (grad.indices().tolist(), grad.values()[:, 0].tolist()))
        return seen

    first, second = cluster.run(work)
    assert first == second == [([[3, 4]], [1, 1]), ([[3, 4]], [3, 1]), None]
