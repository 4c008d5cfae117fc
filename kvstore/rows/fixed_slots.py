"""The slots of a table that has all its rows from the start: the id says which. Rows are made on their first push."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from kvstore.rows.ids import Ids
from kvstore.rows.index import ABSENT, Entries, Positions
from kvstore.rows.slabs import Array, Slab


def find_in_all(fixed: Sequence[FixedSlots], ids: Sequence[Ids]) -> list[Entries]:
    """Return what ``find`` of each of ``fixed``, of equally many stripes, does for its ``ids``."""
    starts = list(itertools.accumulate(map(len, ids), initial=0))
    slots = fixed[0].slots_of(np.concatenate(ids))
    parts = [slots[start:stop] for start, stop in itertools.pairwise(starts)]
    if not all(each.full for each in fixed):
        made = np.empty(len(slots), bool)
        for each, part, start in zip(fixed, parts, starts, strict=False):
            each.made_of(part, made[start : start + len(part)])
        slots[~made] = ABSENT
    return parts


class FixedSlots:
    """Stripe ``stripe`` of ``stripes`` of a table of ``rows`` rows; the interface is ``SlotIndex``'s.

    Attributes:
        top: how many slots there are.
    """

    def __init__(self, rows: int, stripe: int, stripes: int) -> None:
        self._stripe, self._stripes = stripe, stripes
        self.top = max(0, -(-(rows - stripe) // stripes))
        self._made = Slab(None, np.bool_, self.top)
        self._made.reserve(self.top)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes that say which rows are made."""
        return self.top

    def find(self, ids: Ids) -> Entries:
        """Return the slot of each id, ``ABSENT`` for those whose row is not made yet."""
        slots = self.slots_of(ids)
        if not self.full:
            slots[~self._made.items.take(slots, mode="clip")] = ABSENT
        return slots

    @property
    def full(self) -> bool:
        """Whether all rows are made."""
        return self._count == self.top

    def made_of(self, slots: Entries, out: Array) -> None:
        """Write into ``out`` whether the row of each of ``slots`` is made."""
        if self.top:
            self._made.items.take(slots, out=out, mode="clip")

    def insert(self, ids: Ids) -> Entries:
        """Note that the rows of ``ids`` are made; return their slots."""
        slots = self.slots_of(ids)
        self._made.items[slots] = True
        self._count += len(slots)
        return slots

    def ids_of(self, slots: Positions | Entries) -> Ids:
        """Return the ids of ``slots``."""
        ids = slots.astype(np.int64)
        ids *= self._stripes
        ids += self._stripe
        return ids

    def slots(self) -> Positions:
        """Return the slots of all rows that are made, rising."""
        return np.flatnonzero(self._made.items[: self.top])

    def remove(self, slots: Entries) -> None:
        """Raise: no row of such a table goes."""
        raise AssertionError("a row of a table with a shape cannot go")

    def slots_of(self, ids: Ids) -> Entries:
        """Return the slots that the rows of ``ids`` have, made or not; in new memory."""
        return (ids // self._stripes if self._stripes > 1 else ids).astype(np.int64)
