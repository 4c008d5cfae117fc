"""A small model, and what workers that train it do in turn and alone."""

from __future__ import annotations

from threading import Lock
from typing import Any

import torch
from torch import nn

_seeding = Lock()  # the generator is everybody's, and workers are threads here


def network(seed: int = 0) -> nn.Module:
    with _seeding:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def backward(model: nn.Module, step: int, rank: int, workers: int, each: int = 4) -> None:
    """Of the mean loss of this worker's part of the step's batch."""
    draws = torch.Generator().manual_seed(1000 + step)
    data, labels = torch.randn(workers * each, 6, generator=draws), torch.randint(3, (workers * each,), generator=draws)
    part = slice(rank * each, (rank + 1) * each)
    model.zero_grad()
    nn.functional.cross_entropy(model(data[part]), labels[part]).backward()


def same(one: nn.Module, two: nn.Module, atol: float = 1e-6) -> None:
    for (name, mine), theirs in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=atol, msg=name)


def together(workers: int, steps: int, options: dict[str, Any]) -> nn.Module:
    """One process, on the joined batches."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), **options)
    for step in range(steps):
        backward(model, step, 0, 1, 4 * workers)
        optimizer.step()
    return model


def constant(rank: int, size: int = 10, **options: Any) -> tuple[nn.Parameter, torch.optim.SGD]:
    """A parameter whose gradient is the rank, always; a step subtracts it."""
    param = nn.Parameter(torch.zeros(size))
    param.grad = torch.full_like(param, rank)
    return param, torch.optim.SGD([param], lr=1.0, **options)
