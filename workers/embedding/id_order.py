"""Ids of a batch sorted, table by table: it decides in which order gradients of the same id are summed. Pure.

The order decides the last bits of a sum of three or more. A job of one worker uses torch's order, so its sums have the
bits of torch's own sparse gradients. A job of several workers adds their sums, which torch alone does not, so no bits
of torch's could be met. It uses the order of the positions, which takes an eighth of the time to find.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch

Sort: TypeAlias = Callable[[Sequence[torch.Tensor]], "tuple[torch.Tensor, torch.Tensor]"]


def sort_for(workers: int) -> Sort:
    """Return how to sort in a job of so many workers."""
    return as_torch if workers == 1 else by_position


def as_torch(ids: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids sorted, and where each was; equal ones in the order that they have in a sparse gradient of torch's.

    Each table is sorted alone: torch's order of equal ids depends on all the others.

    Args:
        ids: of each of several tables, at least one; int64, of one dimension, on the CPU.

    Returns:
        Two tensors of int64, which have the tables one after the other: the ids, and the position of each in its table.
    """
    return _by_torch(ids, stable=False)


def by_position(ids: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids sorted, and where each was; equal ones in the order of their positions. See ``as_torch``."""
    sizes = [len(each) for each in ids]
    bits = max(max(sizes) - 1, 1).bit_length()
    joint = np.concatenate([each.numpy() for each in ids])
    if len(joint) and int(joint.view(np.uint64).max()) >> (63 - bits):  # negative, or without room for a position
        return _by_torch(ids, stable=True)
    # With its position below it, each id is another number, and numbers alone are sorted in a tenth of the time.
    joint <<= bits
    positions = np.arange(max(sizes))
    first = 0
    for size in sizes:
        part = joint[first : first + size]
        part |= positions[:size]
        part.sort()
        first += size
    return torch.from_numpy(joint >> bits), torch.from_numpy(joint & ((1 << bits) - 1))


def _by_torch(ids: Sequence[torch.Tensor], stable: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if len(ids) == 1:
        return torch.sort(ids[0], stable=stable)
    sizes = [len(each) for each in ids]
    ordered, order = (torch.empty(sum(sizes), dtype=torch.int64, device="cpu") for _ in range(2))
    for each, values, places in zip(ids, torch.split(ordered, sizes), torch.split(order, sizes), strict=True):
        torch.sort(each, stable=stable, out=(values, places))
    return ordered, order
