"""Where numpy can work: most of what is fast on the CPU here is numpy's, and other devices have only torch's."""

from __future__ import annotations

import torch


def on_host(tensor: torch.Tensor) -> bool:
    """Whether numpy can work on ``tensor`` where it lies."""
    return tensor.is_cpu
