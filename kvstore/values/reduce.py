"""Sums in a fixed order: the same contributions always give the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_HALVES = (torch.float16, torch.bfloat16)


def sum_in_order(
    tensors: Sequence[torch.Tensor], *, out: torch.Tensor | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the sum of ``tensors``, added from first to last, on the device of the first; none of them changes.

    Half-precision values are summed in float32, and rounded at most once.

    Args:
        tensors: one or more of one shape and dtype. Among those of half precision there may be float32 ones, which are
            sums themselves.
        out: where to put the sum, of the dtype that the sum is to have. By default the sum is a new tensor; a single
            tensor is returned as it is if it has the dtype.
        dtype: of the sum, without ``out``; by default that of the first.
    """
    first, *rest = tensors
    dtype = out.dtype if out is not None else dtype or first.dtype
    if not rest:
        return first.to(dtype) if out is None else out.copy_(first)
    device = first.device
    wide = summed_in(dtype)
    room = out if dtype == wide else None
    if first.dtype == wide and rest[0].dtype == wide:
        total = torch.add(first, _on(rest[0], device), out=room)  # one pass less than to copy the first
        rest = rest[1:]
    else:  # torch.add would add two halves in half precision, whatever the dtype of its out
        total = first.to(wide, copy=True) if room is None else room.copy_(first)
    for tensor in rest:
        total.add_(_on(tensor, device))
    if out is None:
        return total.to(dtype)
    return out if total is out else out.copy_(total)


def reduce_to(tensors: Sequence[torch.Tensor], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the sum of ``tensors``, which may be on several devices, on ``device``; see ``sum_in_order``."""
    return sum_in_order([tensor.to(device, non_blocking=device.type == "cuda") for tensor in tensors], dtype=dtype)


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` are summed; see ``kvstore.spec.sum_dtype``."""
    return torch.float32 if dtype in _HALVES else dtype


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)
