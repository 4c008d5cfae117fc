"""Where numpy can work: most of what is fast on the CPU here is numpy's, and other devices have only torch's."""

from __future__ import annotations

import torch


def on_host(tensor: torch.Tensor) -> bool:
    """Whether numpy can work on ``tensor`` where it lies."""
    return tensor.is_cpu


def extremes(values: torch.Tensor) -> tuple[float, float]:
    """Return the smallest and the largest of some values."""
    if on_host(values):
        array = values.numpy()
        return float(array.min()), float(array.max())
    low, high = torch.aminmax(values)
    return float(low), float(high)
