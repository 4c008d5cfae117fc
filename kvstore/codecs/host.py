"""Where numpy can work: most of what is fast on the CPU here is numpy's, and other devices have only torch's."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

Native: TypeAlias = Any  # a numpy array on the CPU, else a tensor


def on_host(tensor: torch.Tensor) -> bool:
    """Whether numpy can work on ``tensor`` where it lies."""
    return tensor.is_cpu


def native(tensor: torch.Tensor) -> Native:
    """Return what to work with: numpy's array over the same memory, or the tensor itself."""
    return tensor.numpy() if on_host(tensor) else tensor


def extremes(values: torch.Tensor) -> tuple[float, float]:
    """Return the smallest and the largest of some values."""
    if on_host(values):
        array = values.numpy()
        return float(array.min()), float(array.max())
    low, high = torch.aminmax(values)
    return float(low), float(high)
