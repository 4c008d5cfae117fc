"""What users hand in, as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvstore.values import readable


def to_tensor(value: Any) -> torch.Tensor:
    """Return ``value`` as a tensor, like ``torch.as_tensor``; also arrays of foreign byte order or negative strides."""
    if isinstance(value, torch.Tensor):
        return value  # as_tensor would move it to the program's default device
    return torch.as_tensor(readable(value) if isinstance(value, np.ndarray) else value, device="cpu")
