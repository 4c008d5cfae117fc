"""The slots of a table that has all its rows from the start: the id says which. Rows are made on their first push."""

from __future__ import annotations

import numpy as np

from kvstore.rows.ids import Ids
from kvstore.rows.index import ABSENT, Entries, Positions
from kvstore.rows.slabs import Slab


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
        slots = self._slots(ids)
        if self._count < self.top:
            slots[~self._made.items.take(slots, mode="clip")] = ABSENT
        return slots

    def insert(self, ids: Ids) -> Entries:
        """Note that the rows of ``ids`` are made; return their slots."""
        slots = self._slots(ids)
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

    def _slots(self, ids: Ids) -> Entries:
        return (ids // self._stripes if self._stripes > 1 else ids).astype(np.int64)
