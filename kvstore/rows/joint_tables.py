"""Several tables of one width, whose rows are looked up, gathered and written together. Pure.

Where their slabs lie in the same arrays (``SlabSpace``), that takes one step for all tables, else one for each.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvstore.rows.frozen_rows import SEEN
from kvstore.rows.ids import Ids
from kvstore.rows.row_table import RowTable
from kvstore.rows.slabs import Array, Slots, gather, scatter
from kvstore.rows.stripe import STATE
from kvstore.rows.sums import Rows


class RowPlaces(NamedTuple):
    """Where rows are."""

    starts: Sequence[int]  # where the slots of each table begin, and where the last table's end
    slots: Slots  # in its table, of each row
    at: Slots | None  # where each row is in the arrays of all tables; None if there are no such

    @property
    def parts(self) -> list[slice]:
        return [slice(start, stop) for start, stop in itertools.pairwise(self.starts)]

    def of(self, number: int) -> Slots:
        return self.slots[self.starts[number] : self.starts[number + 1]]


class JointTables:
    """See the module. It is out of date once the tables have new rows, other states or other memory.

    Attributes:
        evict: whether rows of some of the tables go by themselves.
        rise: whether places rise from table to table, and with the ids of each.
    """

    def __init__(self, tables: Sequence[RowTable]) -> None:
        self._tables = tables
        self._arrays = _common_arrays(tables)
        firsts = [table.slabs[""].first for table in tables] if self._arrays else []
        self._firsts = np.array(firsts) if firsts else None
        self.evict = any(table.table.evict for table in tables)
        self.rise = (
            bool(firsts)
            and all(before < after for before, after in itertools.pairwise(firsts))
            and not any(table.table.grows for table in tables)
        )

    def live(self, ids: Ids, starts: Sequence[int]) -> RowPlaces | None:
        """Return where the rows of ``ids`` are; None if one has no row. No rows of the tables may go."""
        places = self._places(ids, starts)
        return None if len(places.slots) and places.slots.min() < 0 else places

    def gather(self, places: RowPlaces, rows: Rows, states: Mapping[str, Array]) -> None:
        """Write copies of rows, and of their states by name, to ``rows`` and ``states``, which are contiguous."""
        if places.at is not None:
            gather(self._arrays[""], places.at, rows)
            for name, value in states.items():
                gather(self._arrays[STATE + name], places.at, value)
            return
        for table, part in zip(self._tables, places.parts, strict=True):
            table.read(places.slots[part], rows[part], {name: value[part] for name, value in states.items()})

    def write(self, updates: Sequence[tuple[RowPlaces, Rows, Mapping[str, Array]]]) -> None:
        """Make one update of each table with rows that an optimizer has made. What is in two parts is alike in both."""
        # All tables first: the old rows must be in the logs of frozen tables before one of its rows is written.
        for number, table in enumerate(self._tables):
            table.stepped([places.of(number) for places, _, _ in updates] if table.frozen else ())
        for places, rows, states in updates:
            if places.at is None:
                for table, part in zip(self._tables, places.parts, strict=True):
                    table.write(places.slots[part], rows[part], {name: value[part] for name, value in states.items()})
                continue
            scatter(self._arrays[""], places.at, rows)
            for name, value in states.items():
                scatter(self._arrays[STATE + name], places.at, value)
            self._arrays[SEEN][places.at] = self._versions(places)

    def pull(self, ids: Ids, starts: Sequence[int], out: Rows) -> None:
        """Write the rows of ``ids``, which may repeat, to ``out``; see ``live`` and ``RowTable.pull``."""
        places = self._places(ids, starts)
        at = places.at
        if at is None or self.evict:
            for table, part in zip(self._tables, places.parts, strict=True):
                table.pull(ids[part], out[part], places.slots[part])
            return
        # Anything for ids that have no row: to gather all and to overwrite a few takes less than to divide them first.
        gather(self._arrays[""], at, out)
        missing = np.flatnonzero(places.slots < 0)
        if len(missing):
            bounds = itertools.pairwise(np.searchsorted(missing, starts).tolist())
            for table, (first, last) in zip(self._tables, bounds, strict=True):
                which = missing[first:last]
                table.write_missing(ids[which], out, which)

    def _places(self, ids: Ids, starts: Sequence[int]) -> RowPlaces:
        slots = RowTable.found_in_all(self._tables, ids, starts)
        at = None if self._firsts is None else slots + np.repeat(self._firsts, np.diff(starts))
        return RowPlaces(starts, slots, at)

    def _versions(self, places: RowPlaces) -> int | Slots:
        """Return what is noted of rows that the present update has changed."""
        versions = [table.version + 1 for table in self._tables]
        if versions.count(versions[0]) == len(versions):
            return versions[0]
        repeated: Slots = np.repeat(versions, np.diff(places.starts))
        return repeated


def _common_arrays(tables: Sequence[RowTable]) -> dict[str, Array]:
    """Return the arrays that have the slabs of all ``tables``, by name; nothing if there are no such."""
    if len(tables) < 2:
        return {}
    arrays = {name: slab.whole for name, slab in tables[0].slabs.items()}
    for table in tables:
        if len(table.slabs) != len(arrays):
            return {}
        for name, slab in table.slabs.items():
            if arrays.get(name) is not slab.whole:
                return {}
    return arrays
