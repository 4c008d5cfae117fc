"""The slots of a table that has all its rows from the start: the id says which. Rows are made on their first push."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from kvstore.rows.ids import Ids
from kvstore.rows.index import ABSENT, Entries, Positions
from kvstore.rows.slabs import Array, Slab


def find_in_all(fixed: Sequence[FixedSlots], ids: Ids, starts: Sequence[int]) -> Entries:
    """Return what ``find`` of each of ``fixed``, which are of equally many stripes, does for its part of ``ids``.

    Args:
        fixed: at least one.
        ids: of all, one after the other.
        starts: where the part of each begins, and where that of the last ends.
    """
    slots = fixed[0].slots_of(ids)
    if not all(each.full for each in fixed):
        slots[~_made(fixed, slots, starts)] = ABSENT
    return slots


def _made(fixed: Sequence[FixedSlots], slots: Entries, starts: Sequence[int]) -> Array:
    """Return whether the row of each slot is made; see ``find_in_all``."""
    whole = fixed[0].made.whole
    if len(whole) and all(each.made.whole is whole for each in fixed):
        firsts = np.repeat([each.made.first for each in fixed], np.diff(starts))
        made: Array = whole.take(slots + firsts, mode="clip")
        return made
    made = np.empty(len(slots), bool)
    for each, (start, stop) in zip(fixed, itertools.pairwise(starts), strict=True):
        if each.top:
            each.made.items.take(slots[start:stop], out=made[start:stop], mode="clip")
    return made


def slots_in(rows: int, stripe: int, stripes: int) -> int:
    """Return how many of ``rows`` rows are in stripe ``stripe`` of ``stripes``."""
    return max(0, -(-(rows - stripe) // stripes))


class FixedSlots:
    """Stripe ``stripe`` of ``stripes`` of a table of ``rows`` rows; the interface is ``SlotIndex``'s.

    Args:
        rows, stripe, stripes: see above.
        made: for what ``made`` says, of as many items as there are slots; None: in memory of its own.

    Attributes:
        top: how many slots there are.
        made: whether the row of each slot is made.
    """

    def __init__(self, rows: int, stripe: int, stripes: int, made: Slab | None = None) -> None:
        self._stripe, self._stripes = stripe, stripes
        # For a power of two: a division takes longer.
        self._shift = stripes.bit_length() - 1 if not stripes & (stripes - 1) else None
        self.top = slots_in(rows, stripe, stripes)
        self.made = Slab(None, np.bool_, self.top) if made is None else made
        self.made.reserve(self.top)
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
            slots[~self.made.items.take(slots, mode="clip")] = ABSENT
        return slots

    @property
    def full(self) -> bool:
        """Whether all rows are made."""
        return self._count == self.top

    def insert(self, ids: Ids) -> Entries:
        """Note that the rows of ``ids`` are made; return their slots."""
        slots = self.slots_of(ids)
        self.made.items[slots] = True
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
        return np.flatnonzero(self.made.items[: self.top])

    def remove(self, slots: Entries) -> None:
        """Raise: no row of such a table goes."""
        raise AssertionError("a row of a table with a shape cannot go")

    def slots_of(self, ids: Ids) -> Entries:
        """Return the slots that the rows of ``ids`` have, made or not; in new memory."""
        if self._shift is not None:
            return np.right_shift(ids, self._shift, dtype=np.int64)
        return np.floor_divide(ids, self._stripes, dtype=np.int64)
