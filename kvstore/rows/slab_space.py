"""Memory that tables of one width and dtype have in common, so that rows of all of them can be gathered in one step.

Slabs of one name lie one after the other in one array, and a table has the same place in each array. It is virtual
memory, which costs nothing until it is written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np

from kvstore.rows.index import FixedSlots
from kvstore.rows.slabs import HUGE, PAGE, RESERVED, MappedMemory, Slab, Slots

SPACE = 1 << 41  # bytes of virtual memory for the rows of all tables
_Kind: TypeAlias = "tuple[str, int | None, np.dtype[Any]]"


# When and where rows of a table with a shape are put into huge pages. Pure, but for what it asks the system for.
#
# Random rows are gathered and scattered in four fifths of the time if they lie in huge pages. But such a page takes
# all its memory at once. So the system is asked for one where half of the small pages that it replaces have a row
# that is made: then the memory at most doubles. As rows come at random, that is long before half of them are made.
#
# Slabs of several tables can lie in one array. Then all that lies in a page counts, whosever it is.
LOOKED = 1 << 17  # rows that are looked at with an update, whether they are made: some 50 us
# One page is collapsed in so many updates. That takes 0.5 ms, or 5 ms in a virtual machine that gives free memory back
# to its host. DLRM's 26 tables have all of their pages when a trainer has warmed up.
EVERY = 5


class PageQueue:
    """Huge pages that have been asked for, but whose small ones are there: they are collapsed one after the other.

    Tables of one space have one queue, for they are updated in the same rounds.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[MappedMemory, int]] = deque()
        self._updates = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, memory: MappedMemory, number: int) -> None:
        self._waiting.append((memory, number))

    def updated(self) -> None:
        """Collapse a page if it is time for one; called with each update of each table."""
        if self._waiting:
            self._updates += 1
            if self._updates % EVERY == 0:
                memory, number = self._waiting.popleft()
                memory.collapse(number)


class HugePages:
    """Those of one table."""

    def __init__(self, slots: FixedSlots, queue: PageQueue) -> None:
        self._slots, self._queue = slots, queue
        self._slabs: tuple[Slab, ...] = ()
        self._due = 1
        self._rest: Iterator[int] | None = None

    def begin(self, slabs: Iterable[Slab]) -> None:
        self._slabs, self._due, self._rest = tuple(slabs), 1, None

    def updated(self) -> None:
        """Go on; called with each update.

        All pages are looked at, a few with each update, when a quarter more rows are made than the last time.
        """
        self._queue.updated()
        if self._rest is None:
            count = len(self._slots)
            if count < self._due:
                return
            self._due = max(count + 1, min(self._slots.top, count + count // 4))
            self._rest = self._look(0, self._slots.top)
        looked = 0
        for rows in self._rest:
            looked += rows
            if looked >= LOOKED:
                return
        self._rest = None

    def made(self, slots: Slots) -> None:
        """Ask at once for the pages of rows that are made now, and written next, if they are many and lie dense."""
        start, stop = int(slots.min()), int(slots.max()) + 1
        if stop - start <= 2 * len(slots) and (stop - start) * self._slabs[0].item_bytes >= HUGE // 2:
            for _ in self._look(start, stop):
                pass

    def _look(self, start: int, stop: int) -> Iterator[int]:
        """Ask for pages that have items ``start`` to ``stop`` of the slabs; yield after each of how many rows it is."""
        alike: dict[tuple[int, int, bool], list[Slab]] = {}
        for slab in self._slabs:
            alike.setdefault((slab.item_bytes, slab.first, slab.whole is slab.items), []).append(slab)
        for slabs in alike.values():
            for number in slabs[0].huge_pages(start, stop):
                waiting = [slab.memory for slab in slabs if slab.memory is not None and not slab.memory.asked(number)]
                if not waiting:
                    continue
                if self._dense(slabs[0], number):
                    for memory in waiting:
                        if memory.ask(number):
                            self._queue.add(memory, number)
                yield HUGE // slabs[0].item_bytes

    def _dense(self, slab: Slab, number: int) -> bool:
        """Return whether half of the small pages that huge page ``number`` replaces have a row that is made."""
        made = self._slots.made
        together = max(1, PAGE // slab.item_bytes)  # items in a small page
        groups = max(1, HUGE // (together * slab.item_bytes))
        first = number * HUGE // slab.item_bytes - slab.first  # of this table's, or below 0 if it is another's
        last = first + groups * together
        if slab.whole is slab.items or made.whole is made.items:  # the others' rows do not lie there
            flags = made.items[max(0, first) : max(0, last)]
        else:
            flags = made.whole[made.first + first : made.first + last]
        if 2 * np.count_nonzero(flags) < groups:  # that is quick to say
            return False
        whole = len(flags) // together * together
        count = np.count_nonzero(flags[:whole].reshape(-1, together).any(axis=1)) + int(flags[whole:].any())
        return bool(2 * count >= groups)


class SlabSpace:
    """See the module."""

    def __init__(self, row_bytes: int, nbytes: int = SPACE) -> None:
        self._items = nbytes // row_bytes
        self._grown = min(RESERVED, nbytes) // row_bytes
        self._used = 0
        self.queue = PageQueue()
        self._arrays: dict[_Kind, tuple[Slab, set[int]]] = {}

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
