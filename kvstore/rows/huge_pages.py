"""When and where rows of a table with a shape are put into huge pages. Pure, but for what it asks the system for.

Random rows are gathered and scattered in four fifths of the time if they lie in huge pages. But such a page takes all
its memory at once. So the system is asked for one where half of the small pages that it replaces have a row that is
made: then the memory at most doubles. As rows come at random, that is long before half of them are made.

Slabs of several tables can lie in one array. Then all that lies in a page counts, whosever it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from kvstore.rows.fixed_slots import FixedSlots
from kvstore.rows.mapped_memory import HUGE, PAGE, MappedMemory
from kvstore.rows.slabs import Slab, Slots

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
        """Let page ``number`` of ``memory`` be collapsed when it is its turn."""
        self._waiting.append((memory, number))

    def updated(self) -> None:
        """Collapse a page if it is time for one; called with each update of each table."""
        if self._waiting:
            self._updates += 1
            if self._updates % EVERY == 0:
                memory, number = self._waiting.popleft()
                memory.collapse(number)


class HugePages:
    """Those of one table.

    Args:
        slots: of the table.
        queue: for pages whose rows are there.
    """

    def __init__(self, slots: FixedSlots, queue: PageQueue) -> None:
        self._slots, self._queue = slots, queue
        self._slabs: tuple[Slab, ...] = ()
        self._due = 1
        self._rest: Iterator[int] | None = None

    def begin(self, slabs: Iterable[Slab]) -> None:
        """Have ``slabs`` from now on, in place of others."""
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
