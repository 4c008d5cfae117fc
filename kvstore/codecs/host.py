"""Which tensors numpy can work on. On the CPU it is faster than torch for most operations here."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

Native: TypeAlias = Any  # a numpy array on the CPU, else a tensor


def on_host(tensor: torch.Tensor) -> bool:
    """Whether numpy can work on ``tensor`` where it lies."""
    return tensor.is_cpu


def native(tensor: torch.Tensor) -> Native:
    """Return a numpy array over the tensor's memory, or the tensor itself if it is on another device."""
    return tensor.numpy() if on_host(tensor) else tensor


def extremes(values: torch.Tensor) -> tuple[float, float]:
    """Return the smallest and the largest of ``values``."""
    if on_host(values):
        array = values.numpy()
        return float(array.min()), float(array.max())
    low, high = torch.aminmax(values)
    return float(low), float(high)
