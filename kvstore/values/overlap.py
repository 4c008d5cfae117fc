"""Whether arrays overlap in memory, so that the order of writing them matters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch

Lengths: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"

_Ranges: TypeAlias = "tuple[Lengths, Lengths]"


def crossed(
    values: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    owners: Sequence[int] | None = None,
    lengths: Lengths | None = None,
) -> bool:
    """Return whether an output overlaps another output, or another key's input.

    Args:
        values: the inputs, contiguous.
        outs: the outputs. An output may be exactly its own key's input.
        owners: for each of ``outs`` the position of its value; by default they have the same positions.
        lengths: bytes of each value, and of each of ``outs`` too, if these are contiguous and have the same positions.
    """
    starts, stops = _ranges(outs, lengths)
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], stops[order]
    if bool((starts[1:] < stops[:-1]).any()):
        return True
    if values is outs:
        return False
    begins, ends = _ranges(values, lengths)
    first, last = np.searchsorted(stops, begins, "right"), np.searchsorted(starts, ends, "left")
    touched = np.flatnonzero(last > first)
    if bool((last[touched] - first[touched] > 1).any()):
        return True
    outputs = first[touched]  # the one output that overlaps each touched value
    own = order if owners is None else np.asarray(owners)[order]
    return bool((own[outputs] != touched).any() or (starts[outputs] != begins[touched]).any())


def _ranges(tensors: Sequence[torch.Tensor], lengths: Lengths | None) -> _Ranges:
    """Return the address of the first byte of each tensor, and the address after its last."""
    starts = np.fromiter(map(torch.Tensor.data_ptr, tensors), np.int64, len(tensors))
    if lengths is None:
        lengths = np.array([_length(tensor) for tensor in tensors], np.int64)
    return starts, starts + lengths


def _length(tensor: torch.Tensor) -> int:
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.numel() * tensor.itemsize
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.itemsize * (1 + sum((size - 1) * step for size, step in steps))
