"""A list of keys that has been used before: what its arrays must be like, and what to send and to expect for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvstore.shares import Entry, Parcel, parcels
from kvstore.spec import FLOATS, Key

_PLAIN = {torch.Tensor, torch.nn.Parameter}
_STRIDED = {torch.strided}


class Plan:
    """What to do for ``keys``, each of which is listed once.

    Args:
        entries: what is known of them, and perhaps of others.
        keys: the list.
        most: bytes that a message should have.
        small: elements of arrays that share payloads; see ``parcels``.
    """

    def __init__(self, entries: Mapping[Key, Entry], keys: Sequence[Key], most: int, small: int = 0) -> None:
        self.keys = tuple(keys)
        self.entries = [entries[key] for key in keys]
        self.parcels = parcels(entries, keys, most, small)
        self.lengths = np.array([entry.spec.nbytes for entry in self.entries], np.int64)
        self.nbytes = int(self.lengths.sum())
        self.size = sum(entry.spec.size for entry in self.entries)
        self.floats = all(entry.spec.dtype in FLOATS for entry in self.entries)
        self._shapes = [entry.spec.shape for entry in self.entries]
        self._dtypes = [getattr(torch, entry.spec.dtype) for entry in self.entries]

    def plain(self, values: Any) -> Sequence[torch.Tensor] | None:
        """Return ``values`` if they are what most callers have: a list of contiguous CPU tensors that fit the keys.

        Checks thousands at once. None says that they may be right all the same, or wrong.
        """
        if type(values) not in (list, tuple) or not _PLAIN.issuperset(map(type, values)):
            return None
        if [value.dtype for value in values] != self._dtypes or [value.shape for value in values] != self._shapes:
            return None
        if not _STRIDED.issuperset([value.layout for value in values]) or not all(value.is_cpu for value in values):
            return None
        tensors: Sequence[torch.Tensor] = values
        return tensors if all(map(torch.Tensor.is_contiguous, tensors)) else None


def parts_of(parcel: Parcel, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return flat views of the stretches of contiguous ``tensors`` that are in ``parcel``."""
    parts: list[torch.Tensor] = []
    for position, start, stop, whole in parcel.stretches:
        tensor = tensors[position]
        flat = tensor if tensor.dim() == 1 else tensor.view(-1)
        parts.append(flat if whole else flat[start:stop])
    return parts
