"""Two workers with a DistributedOptimizer against the optimizer itself with all samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from threaded import ThreadedJob
from torch import nn

from kvstore.client import DistStore
from workers import DistributedOptimizer

STEPS = 4


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def batch(step: int, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """All samples of a step, or those of one of two workers."""
    generator = torch.Generator().manual_seed(1000 + step)
    x, y = torch.randn(12, 6, generator=generator), torch.randint(3, (12,), generator=generator)
    return (x, y) if rank is None else (x[rank::2], y[rank::2])


def loss_of(model: nn.Module, step: int, rank: int | None = None) -> torch.Tensor:
    x, y = batch(step, rank)
    return nn.functional.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), y)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.3, momentum=0.9, weight_decay=0.01)


Step = Callable[[nn.Module, Any, int, "int | None"], None]


def plain_step(model: nn.Module, optimizer: Any, step: int, rank: int | None) -> None:
    optimizer.zero_grad()
    loss_of(model, step, rank).backward()
    optimizer.step()


def trained(
    cluster: ThreadedJob,
    do: Step = plain_step,
    make: Callable[[Any], torch.optim.Optimizer] = sgd,
    build: Callable[[], nn.Module] = network,
    **options: Any,
) -> list[nn.Module]:
    """Both workers' models after ``STEPS`` steps; they are the same to the bit."""
    models = [build(), build()]
    makers = [make(model.parameters()) for model in models]  # not in threads: torch's first optimizer imports a lot

    def work(store: DistStore) -> None:
        optimizer = DistributedOptimizer(makers[store.rank], kvstore=store, **options)
        for step in range(STEPS):
            do(models[store.rank], optimizer, step, store.rank)

    cluster.run(work)
    for one, two in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, two)
    return models


def alone(
    do: Step = plain_step, make: Callable[[Any], torch.optim.Optimizer] = sgd, build: Callable[[], nn.Module] = network
) -> nn.Module:
    """What the optimizer itself makes of it, with all samples."""
    model = build()
    optimizer = make(model.parameters())
    for step in range(STEPS):
        do(model, optimizer, step, None)
    return model


def same(one: nn.Module, two: nn.Module, atol: float = 1e-6) -> None:
    for ours, theirs in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


@torch.no_grad()
def halve(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)
