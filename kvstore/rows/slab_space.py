"""Memory that tables of one width and dtype have in common, so that rows of all of them can be gathered in one step.

Slabs of one name lie one after the other in one array, and a table has the same place in each array. It is virtual
memory, which costs nothing until it is written.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from kvstore.rows.slabs import RESERVED, Slab

QUIET_S = 0.001
SPACE = 1 << 41  # bytes of virtual memory for the rows of all tables
_Kind: TypeAlias = "tuple[str, int | None, np.dtype[Any]]"


class GrownTables:
    """Tables to which rows have come. A server that waits touches memory for the next rows, so that no round does.

    The system takes 0.3 us to add a page of 4 KB, or 3 to 25 us in a virtual machine that gets it from its host.

    Args:
        clock: in seconds of this thread: in those of others, it waits for a core.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        # Weak: tables refer to this, and the memory of a closed store must not wait for the collector of cycles.
        self._touched: dict[weakref.ref[Any], None] = {}
        self._collapsed: dict[weakref.ref[Any], None] = {}
        self._took = 0.0
        self._clock = clock

    def __bool__(self) -> bool:
        return bool(self._touched or self._collapsed)

    @property
    def patience_s(self) -> float:
        """For how long no message should have come before ``work``.

        Right after an answer, workers need the cores. A huge page is made after as long as it takes: so the next
        message waits at most as long as there has been nothing to do.
        """
        return QUIET_S if self._touched else max(QUIET_S, self._took)

    def add(self, table: Any, collapses: bool) -> None:
        """Have memory touched ahead for ``table``, a ``TableStripe``, and huge pages made if it ``collapses``."""
        self._touched[weakref.ref(table)] = None
        if collapses:
            self._collapsed[weakref.ref(table)] = None

    def work(self) -> None:
        """Do a piece of the work: of some 10 to 100 us, or a huge page."""
        tables = self._touched or self._collapsed
        known = next(iter(tables))
        table, began = known(), self._clock()
        if table is None or not (table.touch_ahead() if tables is self._touched else table.collapse()):
            del tables[known]
        if tables is self._collapsed:
            self._took = self._clock() - began


class SlabSpace:
    """See the module.

    Args:
        grown: learns which of the tables get rows.
    """

    def __init__(self, row_bytes: int, nbytes: int = SPACE, grown: GrownTables | None = None) -> None:
        self._items = nbytes // row_bytes
        self._grown = min(RESERVED, nbytes) // row_bytes
        self._used = 0
        self._arrays: dict[_Kind, tuple[Slab, set[int]]] = {}
        self.grown = GrownTables() if grown is None else grown

    def place(self, most: int | None) -> SlabPlace | None:
        """Return the place of a new table; None if there is no more room."""
        count = self._grown if most is None else most
        if self._used + count > self._items:
            return None
        self._used += count
        return SlabPlace(self, self._used - count, count, most is None)

    def slab(self, name: str, columns: int | None, dtype: Any, place: SlabPlace) -> Slab:
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
    """Where the slabs of one table lie."""

    def __init__(self, space: SlabSpace, first: int, count: int, grows: bool) -> None:
        self._space = space
        self.first, self.count, self.grows = first, count, grows

    def slab(self, name: str, columns: int | None, dtype: Any) -> Slab:
        """Return a new slab, of zeros, with the slabs of other tables that have this name, ``columns`` and dtype.

        If the system does not give so much virtual memory, it has memory of its own.
        """
        return self._space.slab(name, columns, dtype, self)
