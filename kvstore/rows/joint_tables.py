"""Several tables of one width, whose rows are looked up, gathered and written together. Pure.

Where their slabs lie in the same arrays (``SlabSpace``), that takes one step for all tables, else one for each.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.rows.frozen_rows import SEEN
from kvstore.rows.ids import Ids, seed_of
from kvstore.rows.row_table import RowTable
from kvstore.rows.slabs import Array, Slots, gather, scatter
from kvstore.rows.stripe import STATE
from kvstore.rows.sums import Rows, TableIds, unite

_NOTHING: Slots = np.empty(0, np.int64)


@dataclass(slots=True)
class RowPlaces:
    """Where the rows of some ids are."""

    ids: Ids
    starts: Sequence[int]  # where the slots of each table begin, and where the last table's end
    slots: Slots  # in its table, of each row; below 0 for rows that are to be made
    at: Slots | None  # where each row is in the arrays of all tables; None if there are no such
    new: Slots  # the positions of the rows that are to be made

    @property
    def parts(self) -> list[slice]:
        return [slice(start, stop) for start, stop in itertools.pairwise(self.starts)]

    @property
    def new_ids(self) -> TableIds:
        return TableIds(self.ids[self.new], np.searchsorted(self.new, self.starts).tolist())

    def of(self, number: int) -> Slots:
        return self.slots[self.starts[number] : self.starts[number + 1]]


class JointTables:
    """See the module. It is out of date once the tables have other states, or rows that have come another way.

    Attributes:
        evict: whether rows of some of the tables go by themselves.
        admit: whether some of the tables decide which ids get rows.
        rise: whether ``keys`` rise from table to table, and with the ids of each.
    """

    def __init__(self, tables: Sequence[RowTable]) -> None:
        self._tables = tables
        self.evict = any(table.table.evict for table in tables)
        self.admit = any(table.table.admit is not None for table in tables)
        # Rows of all tables begin with one call.
        self._alike = len({(table.table.init, table.table.scale, table.table.dtype) for table in tables}) == 1
        self._seeds = np.array([seed_of(table.table.seed) for table in tables])
        self._random = tables[0].table.init in ("uniform", "normal")
        self._look()

    def _look(self) -> None:
        self._arrays = _common_arrays(self._tables)
        firsts = [table.slabs[""].first for table in self._tables] if self._arrays else []
        self._firsts: Slots = np.array(firsts, np.int64)
        self.rise = (
            bool(firsts)
            and all(before < after for before, after in itertools.pairwise(firsts))
            and not any(table.table.grows for table in self._tables)
        )

    def keys(self, ids: Ids, starts: Sequence[int]) -> Slots:
        """Return a number for each of ``ids``, of tables that ``rise``."""
        keys: Slots = ids // self._tables[0].stripes
        keys += np.repeat(self._firsts, np.diff(starts))
        return keys

    def gather(self, places: RowPlaces, rows: Rows, states: Mapping[str, Array]) -> None:
        """Write copies of rows, and of their states by name, to ``rows`` and ``states``, which are contiguous.

        Rows that are to be made are as they begin; their states are left as they are.
        """
        if len(places.new) < len(rows):
            self._gather(places, rows, states)
        if not len(places.new):
            return
        ids, starts = places.new_ids
        if self._alike:
            seeds = np.repeat(self._seeds, np.diff(starts)) if self._random else None
            self._tables[0].write_new(ids, rows, places.new, seeds)
        else:
            for table, (start, stop) in zip(self._tables, itertools.pairwise(starts), strict=True):
                table.write_new(ids[start:stop], rows, places.new[start:stop])

    def _gather(self, places: RowPlaces, rows: Rows, states: Mapping[str, Array]) -> None:
        # Anything for rows that are to be made: to gather all takes less than to divide them first.
        if places.at is not None:
            gather(self._arrays[""], places.at, rows)
            for name, value in states.items():
                gather(self._arrays[STATE + name], places.at, value)
            return
        for table, part in zip(self._tables, places.parts, strict=True):
            table.read(places.slots[part], rows[part], {name: value[part] for name, value in states.items()})

    def write(self, updates: Sequence[tuple[RowPlaces, Rows, Mapping[str, Array]]]) -> None:
        """Make one update of each table with rows that an optimizer has made. What is in two parts is alike in both."""
        for table in self._tables:
            table.stepped()
        self._claim([places for places, _, _ in updates])
        # All tables first: the old rows must be in the logs of frozen tables before one of its rows is written.
        for number, table in enumerate(self._tables):
            if table.frozen:
                for places, _, _ in updates:
                    table.keep(places.of(number))
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
        """Write the rows of ``ids``, which may repeat, to ``out``; see ``places`` and ``RowTable.pull``."""
        places = self.places(ids, starts)
        at = places.at
        if at is None or self.evict:
            for table, part in zip(self._tables, places.parts, strict=True):
                table.pull(ids[part], out[part], places.slots[part])
            return
        # Anything for ids that have no row: to gather all and to overwrite a few takes less than to divide them first.
        gather(self._arrays[""], at, out)
        missing = places.new
        if len(missing):
            bounds = itertools.pairwise(np.searchsorted(missing, starts).tolist())
            for table, (first, last) in zip(self._tables, bounds, strict=True):
                which = missing[first:last]
                table.write_missing(ids[which], out, which)

    def _claim(self, all_places: Sequence[RowPlaces]) -> None:
        """Give slots to all rows of one or two parts that are to be made."""
        pending = [places for places in all_places if len(places.new)]
        if not pending:
            return
        parts = [places.new_ids for places in pending]
        if len(parts) == 1:
            (ids, starts), each_at = parts[0], [np.arange(len(parts[0].ids))]
        else:
            # In the order of ids, as if the sum had been pushed: so a save's rows have one order, whoever made them.
            union = unite(*parts)
            ids, starts, each_at = union.ids, union.starts, [union.first, union.second]
        slots, moved = RowTable.inserted_in_all(self._tables, ids, starts)
        for places, at in zip(pending, each_at, strict=True):
            places.slots[places.new] = slots[at]
        if moved:
            self._look()
        for places in all_places if moved else pending:
            places.at = self._at(places.slots, places.starts)

    def places(self, ids: Ids, starts: Sequence[int]) -> RowPlaces:
        """Return where the rows of ``ids`` are. No rows of the tables may go."""
        slots = RowTable.found_in_all(self._tables, ids, starts)
        new = np.flatnonzero(slots < 0) if len(slots) and slots.min() < 0 else _NOTHING
        return RowPlaces(ids, starts, slots, self._at(slots, starts), new)

    def _at(self, slots: Slots, starts: Sequence[int]) -> Slots | None:
        return None if not len(self._firsts) else slots + np.repeat(self._firsts, np.diff(starts))

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
