"""Sums in a fixed order, so that the same contributions always give the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_HALF = (torch.float16, torch.bfloat16)


def sum_in_order(tensors: Sequence[torch.Tensor], *, reuse: bool = False) -> torch.Tensor:
    """Return the sum of ``tensors``, added from first to last, on the device of the first.

    Half-precision values are summed in float32 and rounded once.

    Args:
        tensors: one or more of one shape and dtype.
        reuse: the first one may be overwritten with the result. Without it, and with more than one, the result is new
            memory; a single tensor is returned as it is.
    """
    first, *rest = tensors
    if not rest:
        return first
    if first.dtype in _HALF:
        total = first.float()
    elif reuse:
        total = first
    else:
        total = torch.add(first, _beside(rest[0], first))
        rest = rest[1:]
    for tensor in rest:
        total.add_(_beside(tensor, first))
    return total.to(first.dtype)


def reduce_to(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum of ``tensors``, which may be on several devices, on ``device``."""
    return sum_in_order([tensor.to(device, non_blocking=device.type == "cuda") for tensor in tensors])


def _beside(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device == other.device else tensor.to(other.device, non_blocking=True)
