"""Copies between flat CPU tensors, many at once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch.autograd.graph import increment_version

LARGE = 1 << 18  # bytes; from here on the C library's copy, which may go past the caches, is faster than torch's

_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = ctypes.c_void_p


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each of ``sources`` into its target; all are flat and contiguous, and pairs have one size and dtype."""
    small: list[torch.Tensor] = []
    those: list[torch.Tensor] = []
    for target, source in zip(targets, sources, strict=True):
        nbytes = target.numel() * target.itemsize
        if nbytes < LARGE:
            small.append(target)
            those.append(source)
        else:
            _memmove(target.data_ptr(), source.data_ptr(), nbytes)
            increment_version(target)
    if small:
        torch._foreach_copy_(small, those)


def spread(flat: torch.Tensor, sizes: Sequence[int], targets: list[torch.Tensor]) -> None:
    """Copy ``flat`` into ``targets``, one after the other: flat and contiguous, of its dtype and these ``sizes``."""
    if max(sizes, default=0) * flat.itemsize >= LARGE:
        copy_each(targets, flat.split_with_sizes(sizes))
    elif len(targets) == 1:
        targets[0].copy_(flat)
    else:
        torch.split_with_sizes_copy(flat, sizes, out=targets)  # a third less than to split and to copy
