"""Weights and gradients for tests of optimizers: a few matrices, the same for the same seed."""

from __future__ import annotations

from typing import Any

import torch

from kvstore.optim.updater import Updater
from kvstore.spec import Key

SHAPES: dict[Key, tuple[int, ...]] = {"a": (4, 3), "b": (3, 4), "c": (5, 5)}  # matrices: Muon takes nothing else


def numbers(seed: int, dtype: torch.dtype = torch.float32) -> dict[Key, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(shape, generator=generator).to(dtype) for key, shape in SHAPES.items()}


def updated(updater: Updater, weights: dict[Key, torch.Tensor], seed: int, **how: Any) -> dict[Key, torch.Tensor]:
    grads = numbers(seed, next(iter(weights.values())).dtype)
    updater.update([(key, weight, grads[key].clone()) for key, weight in weights.items()], **how)
    return weights


def equal(ours: dict[Key, torch.Tensor], theirs: dict[Key, torch.Tensor], atol: float = 0.0) -> None:
    for key in theirs:
        torch.testing.assert_close(ours[key], theirs[key].detach(), rtol=0, atol=atol)
