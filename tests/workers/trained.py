"""Small models for a Trainer, on one device or several, and the ways to have a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvstore.optim import states_file
from kvstore.optim.states import StateTensors
from workers import Trainer

HOWS: list[dict[str, Any]] = [
    {"kvstore": None},
    {"kvstore": "local"},
    {"kvstore": "device"},
    {"kvstore": "device", "update_on_kvstore": True},
    {"kvstore": "local", "update_on_kvstore": False},
]


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(step: int, size: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator)


def backward(model: nn.Module, data: torch.Tensor, labels: torch.Tensor, reduction: str = "mean") -> None:
    model.zero_grad()
    nn.functional.cross_entropy(model(data), labels, reduction=reduction).backward()


def plain_run(steps: int, **options: Any) -> nn.Module:
    """What torch.optim alone makes of the network."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), **options)
    for step in range(steps):
        backward(model, *batch(step))
        optimizer.step()
    return model


def same(one: nn.Module, two: nn.Module, atol: float = 1e-6) -> None:
    for ours, theirs in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


def weights(*values: float) -> list[nn.Parameter]:
    """One parameter ``w`` on as many devices as there are values."""
    return [nn.Parameter(torch.full((2,), value)) for value in values]


def on_devices(params: list[nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    return [{"w": param} for param in params]


def stepped_and_saved(how: dict[str, Any], path: Path) -> tuple[Trainer, str, StateTensors]:
    """A Trainer after a step of Adam, and the optimizer's name and the states that it has written to ``path``."""
    (param,) = weights(1.0)
    trainer = Trainer({"w": param}, "adam", {"learning_rate": 0.1}, **how)
    param.grad = torch.ones(2)
    trainer.step()
    trainer.save_states(path)
    return trainer, *states_file.read(path)
