"""One stripe of a table in memory: its slots and slabs, how rows are made and go, and how many there are."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore.errors import Mismatch, UsageError
from kvstore.lineage import UNKNOWN, Version
from kvstore.optim.row_rules import RowState
from kvstore.rows.admission import AdmissionRule, EvictionRule, GoneIds, write_beginnings
from kvstore.rows.frozen_rows import SEEN, FrozenRows
from kvstore.rows.halves import array_dtype, widened
from kvstore.rows.ids import Ids, joined, starts_of, stripes_of
from kvstore.rows.index import (
    FixedSlots,
    SlotIndex,
    find_in_fixed,
    insert_in_all,
    insert_in_fixed,
    place_dtype,
    slots_in,
)
from kvstore.rows.index import find_in_all as find_in_indexes
from kvstore.rows.slab_space import SlabSpace
from kvstore.rows.slabs import Array, Slab, Slots, gather, scatter
from kvstore.table import Table

DENSE = 1 << 20  # elements of rows that are made, or updated, at a time where it is all rows of a table
FORESEEN = 2 << 20  # bytes of rows for which memory is touched ahead however small the table is, if as many came
# So many bytes of rows that come at once are a load: no worker waits, and more of them say nothing of what comes next.
LOADED = 8 << 20
COUNT, STATE = "count", "state."  # names of what a row has beside ``SEEN``; states have a prefix


class PartSpec(NamedTuple):
    """What else a row has, under one name: ``columns`` numbers of ``dtype``; 0 columns: one number, in a 1-D array."""

    dtype: str
    columns: int


def beginning(state: RowState, rows: Array) -> float | Array:
    """Return what ``state`` of ``rows`` is before their first update."""
    return widened(rows) if state.initial is None else state.initial


class TableStripe:
    """See the module. For the arguments and attributes, see ``RowTable``."""

    def __init__(
        self,
        table: Table,
        stripe: int = 0,
        stripes: int = 1,
        states: Mapping[str, RowState] | None = None,
        space: SlabSpace | None = None,
        lineage: int = UNKNOWN,
    ) -> None:
        self.table, self.stripe, self.stripes = table, stripe, stripes
        self.lineage = lineage
        self.version = self.steps = 0
        self._most = None if table.rows is None else slots_in(table.rows, stripe, stripes)
        self._space = space
        self._place = None if space is None else space.place(self._most)
        self._slots: SlotIndex | FixedSlots
        entries = self._slab("entries", None, np.int32)
        if table.rows is None or self._most is None:
            self._slots = SlotIndex(entries, self._slab("ids", None, np.int64))
        else:
            places = self._slab("places", None, place_dtype(self._most))
            self._slots = FixedSlots(table.rows, stripe, stripes, entries, places)
        self._admission, self._eviction = AdmissionRule(table), EvictionRule(table, stripe, stripes)
        self._rows = self._slab("", table.width, array_dtype(table.dtype))
        self._seen = self._slab(SEEN, None, np.int64)
        self._counts = Slab(None, np.int64) if self._eviction.by_count else None
        self._gone = GoneIds()
        self._made = self._evicted = self._refused = 0
        self._swept = 0  # the slot at which the next sweep begins
        self._came = self._ahead = 0  # rows that came since memory was touched ahead; slots that it is touched for
        # Replaced as a whole: a save's thread may thaw one while an update goes over them. The lock is for two that do
        # so.
        self._frozen: tuple[FrozenRows, ...] = ()
        self._freezing = threading.Lock()
        self._rule: str | None = None
        self._columns: dict[str, RowState] = {}
        self._states: dict[str, Slab] = {}
        self._keep_states("" if states else None, states or {})

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def at(self) -> Version:
        return Version(self.lineage, self.version)

    @property
    def parts(self) -> dict[str, PartSpec]:
        """What each row has beside its values, in the order of ``FrozenRows.names``.

        ``seen`` is 1 + the update that touched it last; ``count``, where rows go by it, how often it was touched;
        ``state.NAME`` what the optimizer keeps.
        """
        specs = {}
        for name, slab in self.slabs.items():
            if name:
                specs[name] = PartSpec(slab.dtype.name, slab.items.shape[1] if slab.items.ndim > 1 else 0)
        return specs

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept for the rows here."""
        row_bytes: int = sum(slab.item_bytes for slab in self.slabs.values())
        others: int = self._slots.nbytes + self._admission.nbytes + self._gone.nbytes
        return self._slots.top * row_bytes + others + sum(frozen.nbytes for frozen in self._frozen)

    def require(self, ids: Ids) -> None:
        """Check ids that have come from elsewhere. Raises ``UsageError`` if one of them can have no row here."""
        rows = self.table.rows
        wrong = np.zeros(len(ids), bool) if rows is None else (ids < 0) | (ids >= rows)
        if not wrong.any() and self.stripes > 1:
            wrong = stripes_of(self.table, ids, self.stripes) != self.stripe
        if wrong.any():
            at = int(wrong.argmax())
            raise UsageError(
                f"id {int(ids[at])} at position {at} has no row in {self.table}, stripe {self.stripe} of {self.stripes}"
            )

    def statistics(self) -> dict[str, int]:
        """Return how many rows there are, were made, evicted and refused, the bytes of all, and the version.

        ``refused`` counts rows of pushes, not ids.
        """
        rows = len(self._slots)
        if self._eviction.rounds is not None:
            seen = self._seen.items[: self._slots.top]
            rows -= int(np.count_nonzero((seen > 0) & (seen <= self._eviction.oldest(self.version))))
        return {
            "rows": rows,
            "made": self._made,
            "evicted": self._evicted + len(self._slots) - rows,
            "refused": self._refused,
            "bytes": self.nbytes,
            "version": self.version,
        }

    @property
    def frozen(self) -> bool:
        return bool(self._frozen)

    def _thaw(self, frozen: FrozenRows) -> None:
        with self._freezing:
            self._frozen = tuple(each for each in self._frozen if each is not frozen)

    def _slab(self, name: str, columns: int | None, dtype: Any) -> Slab:
        """Return a new slab, beside the slabs of the same name of other tables if there is a space for them."""
        return Slab(columns, dtype, self._most) if self._place is None else self._place.slab(name, columns, dtype)

    def _keep_states(
        self, rule: str | None, states: Mapping[str, RowState], old: Mapping[str, Slab] | None = None
    ) -> None:
        """Have a slab for each of ``states``: ``old``'s of this name, which is of the same rule; else a new one."""
        if old is None:
            old, self.steps = {}, 0
        self._rule, self._columns, self._states = rule, dict(states), {}
        for name, columns in states.items():
            width = self.table.width if columns.columns is None else columns.columns
            kept = old.get(name)
            if kept is not None and (kept.dtype, kept.items.shape[1]) == (columns.dtype, width):
                self._states[name] = kept
                continue
            slab = self._states[name] = self._slab(STATE + name, width, columns.dtype)
            slab.reserve(self._slots.top)
            slab.fill(self._slots.top)
            if columns.initial != 0:
                self._begin_states(slab, columns)
        self.slabs = {"": self._rows, SEEN: self._seen}
        if self._counts is not None:
            self.slabs[COUNT] = self._counts
        self.slabs |= {STATE + name: slab for name, slab in self._states.items()}

    def _begin_states(self, slab: Slab, state: RowState) -> None:
        every, count = self._slots.slots(), max(1, DENSE // self.table.width)
        for start in range(0, len(every), count):
            slots = every[start : start + count]
            slab.items[slots] = beginning(state, gather(self._rows.items, slots))

    @staticmethod
    def found(tables: Sequence[TableStripe], ids: Sequence[Ids]) -> Sequence[Slots | None]:
        """Return the slots of the ids of each of ``tables``, for their ``pull`` and ``begin``; None to find them there.

        A message may have many small tables: looking for ids of one after the other is then what it costs most.
        """
        if len(tables) < 2:
            return [None] * len(tables)
        starts = starts_of(ids)
        slots = TableStripe.found_in_all(tables, joined(ids), starts)
        return [slots[start:stop] for start, stop in itertools.pairwise(starts)]

    @staticmethod
    def found_in_all(tables: Sequence[TableStripe], ids: Ids, starts: Sequence[int]) -> Slots:
        """Return the slots of ``ids``, in one array.

        Args:
            starts: where those of each begin, and where those of the last end.
        """
        slots = [table._slots for table in tables]
        if len(slots) == 1:
            return slots[0].find(ids)
        indexes = [each for each in slots if isinstance(each, SlotIndex)]
        if len(indexes) == len(slots):
            return find_in_indexes(indexes, ids, starts)
        fixed = [each for each in slots if isinstance(each, FixedSlots)]
        if len(fixed) == len(slots) and len({table.stripes for table in tables}) == 1:
            return find_in_fixed(fixed, ids, starts)
        parts = [ids[start:stop] for start, stop in itertools.pairwise(starts)]
        return np.concatenate([each.find(own) for each, own in zip(slots, parts, strict=True)])

    @staticmethod
    def inserted_in_all(tables: Sequence[TableStripe], ids: Ids, starts: Sequence[int]) -> tuple[Slots, bool]:
        """Give slots to ``ids``, which have none; return them, and whether slabs have moved. See ``found_in_all``."""
        fixed = [table._slots for table in tables if isinstance(table._slots, FixedSlots)]
        indexes = [table._slots for table in tables if isinstance(table._slots, SlotIndex)]
        if len(indexes) == len(tables):
            slots: Slots = insert_in_all(indexes, ids, starts)
        elif len(fixed) == len(tables) and len({table.stripes for table in tables}) == 1:
            slots = insert_in_fixed(fixed, ids, starts)
        else:
            parts = zip(tables, itertools.pairwise(starts), strict=True)
            slots = np.concatenate([table._slots.insert(ids[start:stop]) for table, (start, stop) in parts])
        moved, loaded = False, len(ids) * tables[0].table.row_bytes >= LOADED
        for table, count in zip(tables, np.diff(starts).tolist(), strict=True):
            if count:
                moved |= table.made(count, loaded)
        return slots, moved

    def _live(self, ids: Ids, found: Slots | None = None) -> Slots:
        """Return the slot of each id, below 0 where it has no row, or one that counts as gone."""
        slots: Slots = self._slots.find(ids) if found is None else found
        if self._eviction.rounds is not None:
            there = np.flatnonzero(slots >= 0)
            stale = self._seen.items[slots[there]] <= self._eviction.oldest(self.version)
            slots[there[stale]] = -1
        return slots

    def _release_stale(self, slots: Slots) -> None:
        """Free the rows among ``slots`` that count as gone, and mark them as absent there."""
        if self._eviction.rounds is None:
            return
        there = np.flatnonzero(slots >= 0)
        stale = there[self._seen.items[slots[there]] <= self._eviction.oldest(self.version)]
        if len(stale):
            self._remove(slots[stale], self.version)
            slots[stale] = -1

    def _claim(self, ids: Ids, slots: Slots, new: Slots) -> Slots:
        """Return the slots of ``ids``, which are all about to change, with slots for those at ``new``."""
        if len(new):
            slots[new] = self._slots.insert(ids[new])
            self.made(len(new), len(new) * self.table.row_bytes >= LOADED)
        self.keep(slots)
        return slots

    def keep(self, slots: Slots) -> None:
        """Let frozen tables have what is in ``slots``, before anything is written there.

        They find a new slot empty (``seen`` is 0), and in a slot that is used again the row that had it.
        """
        for frozen in self._frozen:
            frozen.keep(slots)

    def made(self, count: int, loaded: bool) -> bool:
        """Have memory for the rows of ``count`` ids that have got slots now; return whether slabs have moved."""
        top = self._slots.top
        moved = collapses = False
        for slab in self.slabs.values():
            moved |= slab.reserve(top)
            collapses |= slab.fill(top, loaded or self._space is None)  # then nobody makes huge pages later
        self._made += count
        if self._space is not None and not loaded:
            self._came += count
            self._space.grown.add(self, collapses)
        return moved

    def collapse(self) -> bool:
        """Make a huge page for rows that are there; return whether there are more to be made."""
        return any(slab.collapse() for slab in (*self.slabs.values(), self._slots.slab))

    def touch_ahead(self) -> bool:
        """Touch memory for a few of the rows that may come next; return whether there is more of it.

        The next rows are as many as came since the last time, and a quarter more. What nobody will write to stays below
        a quarter of what is there, or ``FORESEEN``.
        """
        if self._came:
            most = max(self._slots.top // 4, FORESEEN // self.table.row_bytes)
            self._ahead = self._slots.top + min(self._came + self._came // 4, most)
            self._came = 0
        return any(slab.touch(self._ahead) for slab in (*self.slabs.values(), self._slots.slab))

    def _make_all(self, slots: FixedSlots) -> None:
        if len(slots) == slots.most:
            return
        missing = slots.missing()
        count = max(1, DENSE // self.table.width)
        for start in range(0, len(missing), count):
            ids = missing[start : start + count]
            slots_of_new = self._claim(ids, np.empty(len(ids), np.int64), np.arange(len(ids)))
            rows = np.empty((len(ids), self.table.width), self._rows.dtype)
            write_beginnings(self.table, ids, rows)
            scatter(self._rows.items, slots_of_new, rows)
            for name, columns in self._columns.items():
                self._states[name].items[slots_of_new] = beginning(columns, rows)

    def _count(self, slots: Slots, new: Slots) -> None:
        """Note that the rows of ``slots`` have been touched once more."""
        if self._counts is not None:
            counts = self._counts.items.take(slots)
            counts[new] = 0
            self._counts.items[slots] = counts + 1

    def _evict_after(self, ids: Ids) -> Ids:
        """Let rows go after an update; return which of ``ids`` are still there."""
        if not self.table.evict:
            return ids
        top, rounds = self._slots.top, self._eviction.rounds
        if rounds is not None and top:
            # All slots are swept in half of the rounds in which a row becomes stale: at most half too many are there.
            start = self._swept if self._swept < top else 0
            stop = min(top, start + -(-2 * top // rounds))
            self._remove(self._stale_slots(start, stop), self.version)
            self._swept = stop
        if self._eviction.surplus(len(self._slots)):
            self._remove(self._stale_slots(0, top), self.version)
            if self._remove_surplus(self.version):
                return ids[self._slots.find(ids) >= 0]
        return ids

    def _stale_slots(self, start: int, stop: int) -> Slots:
        if self._eviction.rounds is None:
            return np.empty(0, np.int64)
        seen = self._seen.items[start:stop]
        return start + np.flatnonzero((seen > 0) & (seen <= self._eviction.oldest(self.version)))

    def _remove_surplus(self, version: int) -> int:
        count = self._eviction.surplus(len(self._slots))
        if count:
            slots = self._slots.slots()
            counts = None if self._counts is None else self._counts.items[slots]
            chosen = self._eviction.chosen(count, self._slots.ids_of(slots), self._seen.items[slots], counts)
            self._remove(slots[chosen], version)
        return count

    def _remove(self, slots: Slots, version: int) -> None:
        """Free the rows of ``slots``; ``version`` is the update in which they have gone."""
        if not len(slots):
            return
        self.keep(slots)
        self._gone.add(self._slots.ids_of(slots), version, len(self._slots))
        self._slots.remove(slots.astype(np.int32))
        # Only what says that there is a row: rows and states stay as they are until the slot is used again.
        self._seen.items[slots] = 0
        self._evicted += len(slots)

    def _require_parts(self, ids: Ids, rows: Array, parts: Mapping[str, Array]) -> None:
        known = {COUNT: PartSpec("int64", 0), **self.parts}
        for name, part in parts.items():
            if name not in known:
                raise UsageError(
                    f"there is no place for {name!r} in {self.table}, whose rows have {', '.join(known)}: set the "
                    f"optimizer that it is of first, or load without states"
                )
            columns = known[name].columns
            if part.shape != ((len(ids), columns) if columns else (len(ids),)):
                raise Mismatch(f"{name!r} of {len(ids)} rows of {self.table} has the shape {part.shape}")
        if rows.shape != (len(ids), self.table.width):
            raise Mismatch(f"{len(ids)} rows of {self.table} have the shape {rows.shape}")
        if len(np.unique(ids)) < len(ids):
            raise UsageError(f"an id comes twice among {len(ids)} rows of {self.table}")
