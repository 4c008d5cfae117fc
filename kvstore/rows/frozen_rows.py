"""A table as it was at one moment, read page by page while it changes. Pure.

Nothing is copied at first. Before an update changes rows that have not been read yet, the table gives them to ``keep``,
which puts them as they are into a log. Pages may be read in one thread while another updates the table.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from kvstore.errors import UsageError
from kvstore.lineage import Version
from kvstore.rows.ids import Ids
from kvstore.rows.slabs import Array, Slab, Slots, gather

SEEN = "seen"  # the name of 1 + the update that touched a row last; 0 where a slot has no row


class Page(NamedTuple):
    """Some rows of a table: ids, values of shape (n, width), and what else each row has, by name."""

    ids: Ids
    rows: Array
    parts: dict[str, Array]


class FrozenRows:
    """See the module. Made by ``RowTable.freeze``.

    Args:
        table: how many ``rows`` and ``slots`` the table has, which state it is ``at``, and its ``steps``.
        slabs: the rows, under the name ``""``, and what else each row has.
        changed: the least ``seen`` of the rows that are read; others are left out.

    Attributes:
        rows: how many rows there are at most.
        slots: how many slots there are: pages are read up to there.
        at: the state of the table; ``version`` is its number, how many updates it had had.
        steps: how many of them its optimizer had made.
        names: of what each row has beside its values.
    """

    def __init__(
        self,
        table: tuple[int, int, Version, int],
        ids_of: Callable[[Slots], Ids],
        slabs: Mapping[str, Slab],
        changed: int,
        gone: Ids,
        release: Callable[[FrozenRows], None],
    ) -> None:
        self.rows, self.slots, self.at, self.steps = table
        self.version = self.at.number
        self.gone = len(gone)
        self.names = tuple(name for name in slabs if name)
        self._ids_of, self._gone, self._slabs, self._changed = ids_of, gone, dict(slabs), changed
        # 1 + where in the log a slot's row is. It is memory that the system adds page by page.
        self._kept = np.zeros(self.slots, np.int32)
        self._log = {name: Slab.like(slab, self.slots) for name, slab in slabs.items()}
        self._log_ids = Slab(None, np.int64, self.slots)
        self._logged = 0
        self._passed = self._last = 0  # slots before it are not read again
        self._release: Callable[[FrozenRows], None] | None = release
        # Of the log and of what has been passed. An update calls ``keep`` before it writes, and writes without the
        # lock. So a row that ``page`` finds without an entry in ``_kept`` does not change while the lock is held: its
        # update would have to ``keep`` it first. Of a row with an entry, what lies in the slab may be half written; the
        # log's counts.
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        log: int = 8 + sum(slab.item_bytes for slab in self._log.values())
        return log * self._logged + self._kept.nbytes + self._gone.nbytes

    def page(self, start: int, count: int, state: bool = True) -> Page:
        """Return the rows in slots ``start`` to ``start + count``, in new memory. There may be fewer, or none.

        Pages are read in order. The last two that were read may be read again, for an answer may be lost; what is
        before them may not.

        Raises:
            UsageError: they have been passed, or the table has been thawed.
        """
        with self._lock:
            if self._release is None:
                raise UsageError("this frozen table has been thawed: freeze it again")
            if start < self._passed:
                raise UsageError(f"slots from {start} on have been passed: pages from {self._passed} on can be read")
            if start > self._last:
                self._passed, self._last = self._last, start
            return self._gathered(self._there(start, min(start + count, self.slots)), state)

    def count(self, start: int, count: int) -> int:
        """Return how many rows the slots ``start`` to ``start + count`` have. It is no page that is read."""
        with self._lock:
            return len(self._there(start, min(start + count, self.slots)))

    def changed(self, start: int, stop: int, since: int) -> Slots:
        """Return which of the slots ``start`` to ``stop`` have rows that changed after update ``since``; all if -1."""
        with self._lock:
            return self._there(start, min(stop, self.slots), since + 2)

    def rows_in(self, slots: Slots) -> Array:
        """Return the rows in ``slots``, each of which has one: any slots, if nobody reads pages, which pass them."""
        with self._lock:
            return self._gathered(slots, state=False).rows

    def ids_in(self, slots: Slots) -> Ids:
        """Return the ids of the rows in ``slots``; see ``rows_in``."""
        with self._lock:
            logged, kept = self._in_log(slots)
            ids = self._ids_of(slots)
            ids[logged] = gather(self._log_ids.items, kept)
            return ids

    def _there(self, start: int, stop: int, changed: int = 0) -> Slots:
        """Return which of the slots from ``start`` on have rows whose ``seen`` is at least ``changed``."""
        logged = np.flatnonzero(self._kept[start:stop])
        seen = self._slabs[SEEN].items[start:stop].copy()
        seen[logged] = gather(self._log[SEEN].items, self._kept[start:stop][logged] - 1)
        return np.flatnonzero(seen >= max(self._changed, changed)) + start

    def _in_log(self, slots: Slots) -> tuple[Slots, Slots]:
        """Return which of ``slots`` the log has, as positions, and where."""
        kept = self._kept[slots]
        logged = np.flatnonzero(kept)
        return logged, kept[logged] - 1

    def _gathered(self, slots: Slots, state: bool) -> Page:
        logged, kept = self._in_log(slots)
        ids = self._ids_of(slots)
        ids[logged] = gather(self._log_ids.items, kept)
        values = {}
        for name, slab in self._slabs.items():
            if state or not name:
                values[name] = gather(slab.items, slots)
                values[name][logged] = gather(self._log[name].items, kept)
        return Page(ids, values.pop(""), values)

    def pages(self, count: int, state: bool = True) -> Iterator[Page]:
        for start in range(0, self.slots, count):
            page = self.page(start, count, state)
            if len(page.ids):
                yield page

    def gone_page(self, start: int, count: int) -> Ids:
        ids: Ids = self._gone[start : start + count].copy()
        return ids

    def keep(self, slots: Slots) -> None:
        """Put what is in ``slots``, which is about to change, into the log, if it is still to be read.

        Slots that have no row yet are to be given, too, before they get one.
        """
        # The log first, and ``_kept`` last: a row is found in the log only when all of it is there.
        with self._lock:
            slots = slots[(slots < self.slots) & (slots >= self._passed)]
            slots = slots[self._kept.take(slots) == 0] if len(slots) else slots
            if not len(slots):
                return
            start, stop = self._logged, self._logged + len(slots)
            for name, slab in self._log.items():
                slab.reserve(stop)
                gather(self._slabs[name].items, slots, slab.items[start:stop])
            self._log_ids.reserve(stop)
            self._log_ids.items[start:stop] = self._ids_of(slots)
            self._kept[slots] = np.arange(start + 1, stop + 1, dtype=np.int32)
            self._logged = stop

    def thaw(self) -> None:
        """End it: the table keeps nothing for it any more."""
        with self._lock:
            release, self._release = self._release, None
            if release is not None:
                release(self)
                self._log.clear()
