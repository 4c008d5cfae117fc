"""What one worker knows of its store's keys, and the plans of the lists of them that it uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvstore.errors import KeyNotInitialised
from kvstore.dist.parcels import Entry, Parcel, parcels
from kvstore.spec import FLOATS, Key

MOST = 1024  # plans that are kept
_KEYS = {int, str}


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
        self.places = np.fromiter((entry.place for entry in self.entries), np.int64, len(self.entries))
        self.parcels = parcels(entries, keys, most, small)
        self.lengths = np.array([entry.spec.nbytes for entry in self.entries], np.int64)
        self.nbytes = int(self.lengths.sum())
        self.size = sum(entry.spec.size for entry in self.entries)
        self.floats = all(entry.spec.dtype in FLOATS for entry in self.entries)
        self._shapes = [entry.spec.shape for entry in self.entries]
        self._dtypes = [getattr(torch, entry.spec.dtype) for entry in self.entries]

    def plain(self, values: Any) -> Sequence[torch.Tensor] | None:
        """Return ``values`` if they are what most callers have: a list of contiguous CPU tensors that fit the keys.

        Checks thousands at once. None: they are to be looked at one by one.
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


class Plans:
    """Makes plans, and keeps them: a list of keys that comes again costs no look at each of them.

    Args:
        piece: bytes that a message should have.

    Attributes:
        entries: what is known of each key that this worker has passed to ``init``.
    """

    def __init__(self, piece: int) -> None:
        self.entries: dict[Key, Entry] = {}
        self._piece = piece
        self._fold, self._small = 1, 0
        self._made: dict[tuple[Key, ...], Plan] = {}

    def add(self, entries: Mapping[Key, Entry]) -> None:
        """Take new keys. May be repeated."""
        self.entries.update(entries)

    def fold(self, times: int, small: int) -> None:
        """From now on let messages be of so many times more bytes, and arrays of so few elements share payloads."""
        self._fold, self._small = times, small
        self._made.clear()

    def of(self, keys: Iterable[Key]) -> Plan:
        """Return the plan for ``keys``, each of which is listed once.

        Raises:
            KeyNotInitialised: this worker does not know one of them.
        """
        listed = tuple(keys)
        plan = self._made.get(listed)
        if plan is None:
            for key in listed:
                if key not in self.entries:
                    raise KeyNotInitialised(f"key {key!r} has no value on this worker; call init first")
            if len(self._made) >= MOST:
                self._made.clear()
            plan = self._made[listed] = Plan(self.entries, listed, self._piece * self._fold, self._small)
        return plan

    def plain(self, key: Any, arrays: Any) -> tuple[Plan, Sequence[torch.Tensor]] | None:
        """Return the plan for ``key``, or a list of them, and ``arrays``: if it is kept, and they are plain.

        None: not on this fast way; they are to be looked at one by one.
        """
        several = isinstance(key, list | tuple)
        listed = tuple(key) if several else (key,)
        plan = self._made.get(listed) if _KEYS.issuperset(map(type, listed)) else None
        if plan is None:
            return None
        tensors = plan.plain(arrays if several else [arrays])
        return None if tensors is None else (plan, tensors)
