"""Sums in a fixed order: the same contributions always give the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_HALF = (torch.float16, torch.bfloat16)


def sum_in_order(tensors: Sequence[torch.Tensor], *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the sum of ``tensors``, added from first to last, on the device of the first; none of them changes.

    Half-precision values are summed in float32 and rounded once.

    Args:
        tensors: one or more of one shape and dtype.
        out: where to put the sum. By default the sum is a new tensor; a single tensor is returned as it is.
    """
    first, *rest = tensors
    if not rest:
        return first if out is None else out.copy_(first)
    device = first.device
    if first.dtype in _HALF:
        total = first.float()
    else:
        total = torch.add(first, _on(rest[0], device), out=out)
        rest = rest[1:]
    for tensor in rest:
        total.add_(_on(tensor, device))
    if out is None:
        return total.to(first.dtype)
    return out if total is out else out.copy_(total)


def reduce_to(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum of ``tensors``, which may be on several devices, on ``device``."""
    return sum_in_order([tensor.to(device, non_blocking=device.type == "cuda") for tensor in tensors])


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)
