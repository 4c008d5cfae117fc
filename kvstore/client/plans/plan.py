"""What one worker knows of its store's keys, and the plans of the lists of them that it uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kvstore.cached import cached
from kvstore.client.plans.entries import Entries
from kvstore.client.plans.parcels import Parcel, SegmentTable, pack
from kvstore.client.plans.pieces import Pieces
from kvstore.errors import Mismatch
from kvstore.spec import FLOATS, Key, Spec, without_value
from kvstore.values import Arrays, Layout, outputs_of, values_of

MOST = 1 << 20  # keys in all plans that are kept
PLAN = 64  # keys that take as much memory as a plan without any
_KEYS = {int, str}


class Plan:
    """What to do for ``keys``, each of which is listed once.

    Args:
        entries: what is known of them, and perhaps of others.
        keys: the list.
        most: bytes that a message should have.
        small: elements of arrays that share payloads; see ``pack``.
        weight: see below.

    Attributes:
        places: of the keys, among those of the store.
        parcels: the messages.
        weight: what a byte counts in the send window, which has room for a number of messages of the usual size.
        layout: what arrays are to be.
        floats: whether all are of floating point.
    """

    def __init__(self, entries: Entries, keys: Sequence[Key], most: int, small: int = 0, weight: float = 1.0) -> None:
        table = SegmentTable(entries, keys)
        self.keys = tuple(keys)
        self.places = table.places
        self.parcels = pack(table, most, small)
        self.weight = weight
        self.layout = Layout(table.kinds, table.specs)
        self.floats = all(spec.dtype in FLOATS for spec in table.specs)
        self._table = table

    def values(self, arrays: Any) -> Arrays | None:
        """Return ``arrays`` as values if there is one for each key and ``values_of`` takes them; else None."""
        return values_of(arrays, self.layout) if self._has_all(arrays) else None

    def outputs(self, arrays: Any) -> Arrays | None:
        """Return ``arrays`` as what to write into; see ``outputs_of``."""
        return outputs_of(arrays, self.layout) if self._has_all(arrays) else None

    def _has_all(self, arrays: Any) -> bool:
        return type(arrays) in (list, tuple) and len(arrays) == len(self.keys)

    @cached
    def specs(self) -> list[Spec]:
        """Of each key."""
        return list(map(self._table.specs.__getitem__, self._table.kinds.tolist()))


def views_of(parcel: Parcel, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return flat views of the ranges of contiguous ``tensors`` that are in ``parcel``."""
    views: list[torch.Tensor] = []
    for position, start, stop, whole in parcel.ranges:
        tensor = tensors[position]
        flat = tensor if tensor.dim() == 1 else tensor.view(-1)
        views.append(flat if whole else flat[start:stop])
    return views


class Plans:
    """Makes plans, and keeps them: a list of keys that comes again costs no look at each of them.

    Args:
        pieces: how many bytes a message should have.

    Attributes:
        entries: what is known of each key that this worker has passed to ``init``.
    """

    def __init__(self, pieces: Pieces) -> None:
        self.entries = Entries()
        self._pieces = pieces
        self._fold, self._small = 1, 0
        self._made: dict[tuple[Key, ...], Plan] = {}
        self._kept = 0

    def fold(self, times: int, small: int) -> None:
        """From now on let messages be of so many times more bytes, and arrays of so few elements share payloads."""
        self._fold, self._small = times, small
        self._forget()

    def of(self, keys: Iterable[Key]) -> Plan:
        """Return the plan for ``keys``, each of which is listed once.

        Raises:
            KeyNotInitialized: this worker does not know one of them.
            Mismatch: one of them is a table.
        """
        listed = tuple(keys)
        plan = self._made.get(listed)
        if plan is None:
            for key in listed:
                if key not in self.entries:
                    raise without_value(key, self.entries, " on this worker")
                if key in self.entries.tables:
                    raise Mismatch(f"key {key!r} is {self.entries.tables[key]}: push and pull its rows by their ids")
            plan = self._make(listed)
        return plan

    def known(self, key: Any) -> Plan | None:
        """Return the plan for ``key``, or a list of keys, if all are of known arrays and each is listed once.

        None: not on the fast path; validate fully.
        """
        listed = tuple(key) if isinstance(key, list | tuple) else (key,)
        if not _KEYS.issuperset(map(type, listed)):  # 1.0 and True would be found as 1
            return None
        plan = self._made.get(listed)
        if plan is None and listed and self.entries.places.keys() >= (distinct := set(listed)):
            arrays = self.entries.tables.keys().isdisjoint(distinct)
            plan = self._make(listed) if arrays and len(distinct) == len(listed) else None
        return plan

    def _make(self, listed: tuple[Key, ...]) -> Plan:
        if self._kept > MOST:
            self._forget()
        self._kept += PLAN + len(listed)
        piece = self._pieces.of(self.entries.nbytes)
        weight = self._pieces.most / piece
        plan = self._made[listed] = Plan(self.entries, listed, piece * self._fold, self._small, weight)
        return plan

    def _forget(self) -> None:
        self._made.clear()
        self._kept = 0
