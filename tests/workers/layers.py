"""Three layers, and what workers that train them do; tests make a bucket of each."""

from __future__ import annotations

import torch
from torch import nn

SGD = {"learning_rate": 0.1, "momentum": 0.9}
BUCKET_BYTES = 64  # each weight fills one; the bias after it belongs to it


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(model: nn.Module, step: int, rows: slice = slice(0, 6)) -> torch.Tensor:
    draws = torch.Generator().manual_seed(1000 + step)
    data, labels = torch.randn(12, 4, generator=draws), torch.randint(3, (12,), generator=draws)
    return nn.functional.cross_entropy(model(data[rows]), labels[rows])


def backward(model: nn.Module, step: int, rows: slice = slice(0, 6)) -> None:
    model.zero_grad()
    loss_of(model, step, rows).backward()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def equal(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, two, strict=True))
