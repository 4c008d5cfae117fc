"""Two workers of a job against torch alone, with both their batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from threaded import ThreadedJob
from torch import nn

from kvstore.client import DistStore

BOTH = pytest.mark.parametrize("update_on_kvstore", [True, False], ids=["on the servers", "in the workers"])


SGD = {"lr": 0.1, "momentum": 0.9}


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
