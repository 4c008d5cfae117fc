"""Whether arrays share memory in ways that make it count which of them is written first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch

Lengths: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"

_Spans: TypeAlias = "tuple[Lengths, Lengths]"


def crossed(
    values: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    owners: Sequence[int] | None = None,
    lengths: Lengths | None = None,
) -> bool:
    """Return whether to write one of ``outs`` is to change a value that is not its own, or another of them.

    Args:
        values: what is read, contiguous.
        outs: what is written; to write a value's own memory, all of it, is fine.
        owners: for each of ``outs`` the position of its value; by default they have the same positions.
        lengths: bytes of each value, and of each of ``outs`` too, if these are contiguous and have the same positions.
    """
    starts, stops = _spans(outs, lengths)
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], stops[order]
    if bool((starts[1:] < stops[:-1]).any()):
        return True
    if values is outs:
        return False
    begins, ends = _spans(values, lengths)
    first, last = np.searchsorted(stops, begins, "right"), np.searchsorted(starts, ends, "left")
    touched = np.flatnonzero(last > first)
    if bool((last[touched] - first[touched] > 1).any()):
        return True
    its = first[touched]
    own = order if owners is None else np.asarray(owners)[order]
    return bool((own[its] != touched).any() or (starts[its] != begins[touched]).any())


def _spans(tensors: Sequence[torch.Tensor], lengths: Lengths | None) -> _Spans:
    """The first byte of each, and the one behind its last."""
    starts = np.fromiter(map(torch.Tensor.data_ptr, tensors), np.int64, len(tensors))
    if lengths is None:
        lengths = np.array([_length(tensor) for tensor in tensors], np.int64)
    return starts, starts + lengths


def _length(tensor: torch.Tensor) -> int:
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.numel() * tensor.itemsize
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.itemsize * (1 + sum((size - 1) * step for size, step in steps))
