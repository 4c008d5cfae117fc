"""Memory that tables of one width and dtype have in common, so that rows of all of them can be gathered in one step.

Slabs of one name lie one after the other in one array, and a table has the same place in each array. It is virtual
memory, which costs nothing until it is written.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from kvstore.rows.huge_pages import PageQueue
from kvstore.rows.slabs import RESERVED, Slab

SPACE = 1 << 41  # bytes of virtual memory for the rows of all tables
_Kind: TypeAlias = "tuple[str, int | None, np.dtype[Any]]"


class SlabSpace:
    """See the module.

    Args:
        row_bytes: of a row of the tables.
        nbytes: of virtual memory for rows.

    Attributes:
        queue: for huge pages of all tables.
    """

    def __init__(self, row_bytes: int, nbytes: int = SPACE) -> None:
        self._items = nbytes // row_bytes
        self._grown = min(RESERVED, nbytes) // row_bytes
        self._used = 0
        self.queue = PageQueue()
        self._arrays: dict[_Kind, tuple[Slab, set[int]]] = {}

    def place(self, most: int | None) -> SlabPlace | None:
        """Return the place of a new table; None if there is no more room.

        Args:
            most: how many rows it can have; None for a table that grows.
        """
        count = self._grown if most is None else most
        if self._used + count > self._items:
            return None
        self._used += count
        return SlabPlace(self, self._used - count, count, most is None)

    def slab(self, name: str, columns: int | None, dtype: Any, place: SlabPlace) -> Slab:
        """Return a new slab of the table at ``place``; see ``SlabPlace.slab``."""
        kind = name, columns, np.dtype(dtype)
        array, taken = self._arrays.get(kind, (None, set()))
        if array is None or place.first in taken:  # what is there is another slab's
            array, taken = self._arrays[kind] = Slab(columns, dtype, self._items), set()
            try:
                array.reserve(self._items)
            except MemoryError:  # a limit of address space, or much of it is in use
                del self._arrays[kind]
                return Slab(columns, dtype, None if place.grows else place.count)
        taken.add(place.first)
        return array.part(place.first, place.count, place.grows)


class SlabPlace:
    """Where the slabs of one table lie.

    Attributes:
        first, count: which items of each array are its own.
        grows: whether it may need more.
    """

    def __init__(self, space: SlabSpace, first: int, count: int, grows: bool) -> None:
        self._space = space
        self.first, self.count, self.grows = first, count, grows

    def slab(self, name: str, columns: int | None, dtype: Any) -> Slab:
        """Return a new slab, of zeros, with the slabs of other tables that have this name, ``columns`` and dtype.

        If the system does not give so much virtual memory, it has memory of its own.
        """
        return self._space.slab(name, columns, dtype, self)
