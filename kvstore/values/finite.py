"""Whether values are finite."""

from __future__ import annotations

import math

import torch


def all_finite(values: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
    """Return whether no element is NaN or infinite in ``dtype``; by default their own, or float32 if they have half."""
    if dtype is None:
        dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    # A sum is NaN or infinite if an element is, and thirty times as fast as a look at each. It may overflow, too.
    if math.isfinite(values.sum(dtype=dtype).item()):
        return True
    return bool(torch.isfinite(values.to(dtype)).all())
