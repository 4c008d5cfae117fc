"""Which slot the row of an id has: a hash table in numpy, with open addressing. Pure.

An entry is the number of a slot, and the ids lie in a slab by slot, so any id can be stored, and an entry has 4 bytes.
Entries are found by linear probing, thousands of ids at a time: each step looks at the next entry of all that are left.
Between a quarter and a half of the entries are used, but for a new or a shrunk index.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvstore.errors import UsageError
from kvstore.rows.ids import Ids, mixed
from kvstore.rows.slabs import Slab

Entries: TypeAlias = "np.ndarray[Any, np.dtype[np.int32]]"
Positions: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Flags: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"

FREE, DELETED, ABSENT = -1, -2, -1
LEAST = 64  # entries
CHUNK = 1 << 14  # ids that are looked up at a time: what is computed of them stays in the processor's cache
MOST_SLOTS = 2**31 - 2  # entries are int32
# A look at the next entry is some ten calls of numpy, whatever the number of ids. While many are left, one entry at a
# time computes the least; the few with a long way cost calls only, so eight entries are looked at with the same calls.
FEW = 1024  # ids; of so many the next entries are looked at together
WINDOW = 8  # of those entries
SINGLE = 64  # ids that are given an entry one by one: with all of numpy's calls, the last few would cost most
_AHEAD = np.arange(1, WINDOW + 1)


class SlotIndex:
    """See the module. Slots of ids that have been removed are used again, the last first.

    Args:
        entries, ids: for what its entries and the ids of its slots are, of int32 and int64; None: in memory of its own.
            Indexes that have them in the same arrays are looked into together.
    """

    def __init__(self, entries: Slab | None = None, ids: Slab | None = None) -> None:
        self.ids = Slab(None, np.int64) if ids is None else ids
        self.room = Slab(None, np.int32) if entries is None else entries
        self.top = 0
        self.entries = self._free_entries(LEAST)
        self._deleted = 0  # entries of removed ids
        # Slots of removed ids, in batches as they were removed: a list of single numbers would take ten times the
        # memory.
        self._released: list[Entries] = []
        self._used = 0

    def __len__(self) -> int:
        return self._used

    @property
    def slab(self) -> Slab:
        """What lies by slot."""
        return self.ids

    @property
    def clean(self) -> bool:
        """Whether no entries of removed ids are left."""
        return not self._deleted

    @property
    def nbytes(self) -> int:
        """Bytes of the entries and the ids."""
        return self.entries.nbytes + self.top * 8 + sum(batch.nbytes for batch in self._released)

    def find(self, ids: Ids) -> Entries:
        """Return the slot of each id, ``ABSENT`` where there is none. The ids may repeat and have any order."""
        return probe(self.entries, self.ids.items, ids)

    def insert(self, ids: Ids) -> Entries:
        """Give a slot to each of ``ids``, none of which has one or is there twice; return the slots.

        Raises:
            UsageError: there would be more than 2^31 rows. Nothing has changed.
        """
        return insert_in_all([self], ids, [0, len(ids)])

    def begin(self, ids: Ids) -> Entries:
        """Begin to ``insert``: what is left is to give each of the slots that are returned an entry."""
        count = len(ids)
        if self._used + count > MOST_SLOTS:
            raise UsageError(f"a server holds at most {MOST_SLOTS} rows of a table: start more servers, or evict rows")
        if (self._used + self._deleted + count) * 2 > len(self.entries):
            self._rebuild(self._used + count)
        self._used += count
        taken: list[Entries] = []
        while count and self._released:
            batch = self._released.pop()
            taken.append(batch[max(0, len(batch) - count) :])
            if len(batch) > count:
                self._released.append(batch[: len(batch) - count])
            count -= len(taken[-1])
        start, self.top = self.top, self.top + count
        self.ids.reserve(self.top)
        self.ids.fill(self.top)
        self.ids.items[start : self.top] = ids[len(ids) - count :]
        slots = np.arange(start, self.top, dtype=np.int32)
        if taken:
            again = np.concatenate(taken)
            self.ids.items[again] = ids[: len(again)]
            slots = np.concatenate([again, slots])
        return slots

    def enter(self, ids: Ids, slots: Entries) -> None:
        """Give each of ``slots``, which have ``ids``, an entry."""
        for start in range(0, len(ids), CHUNK):
            part = slice(start, start + CHUNK)
            self._deleted -= _enter(self.entries, _Place(len(self.entries) - 1), ids[part], slots[part], self.clean)

    def remove(self, slots: Entries) -> None:
        """Take ids out, by their slots, each of which is in use and given once."""
        entries, mask = self.entries, len(self.entries) - 1
        at, left = _homes(self.ids.items[slots], mask), slots
        while len(left):
            here = entries.take(at) == left
            # Not FREE: a search ends at a free entry, and would not reach ids that were placed behind this one.
            entries[at[here]] = DELETED
            at, left = (at[~here] + 1) & mask, left[~here]
        self._deleted += len(slots)
        self._used -= len(slots)
        if len(slots):
            self._released.append(np.array(slots, np.int32))

    def ids_of(self, slots: Positions | Entries) -> Ids:
        return self.ids.items.take(slots)

    def slots(self) -> Positions:
        """Return all slots in use, rising."""
        used = np.ones(self.top, bool)
        for batch in self._released:
            used[batch] = False
        return np.flatnonzero(used)

    def _rebuild(self, count: int) -> None:
        """Make the entries anew, for ``count`` ids and half as many again."""
        # More than half full, searches get long: with linear probing, full stretches grow together. Room for half as
        # many again keeps a table whose ids come and go from being rebuilt each time; entries of removed ids go only
        # here.
        wanted = LEAST
        while wanted < 2 * count + count // 2:
            wanted *= 2
        used = self.slots().astype(np.int32)
        self.entries = self._free_entries(wanted)
        self._deleted = 0
        self.enter(self.ids.items[used], used)

    def _free_entries(self, count: int) -> Entries:
        self.room.reserve(count)
        entries = self.room.items[:count]
        entries[:] = FREE
        return entries


class _Place(NamedTuple):
    """Where what is looked at lies: for one index, or as arrays with what is so for each id."""

    mask: Any  # how many entries there are, less one
    base: Any = None  # the first entry; None for 0
    first: Any = None  # the first slot

    def of(self, which: Any) -> _Place:
        return self if self.base is None else _Place(*(each[which] for each in self))

    def column(self) -> _Place:
        return self if self.base is None else _Place(*(each[:, None] for each in self))


def _moved(numbers: Positions | Entries, by: Any) -> Any:
    return numbers if by is None else numbers + by


def _joint(indexes: Sequence[SlotIndex], starts: Sequence[int]) -> _Place | None:
    """Return where the entries for each id are in the arrays that ``indexes`` have in common, if they have such."""
    first = indexes[0]
    if len(indexes) < 2 or starts[-1] > len(indexes) * CHUNK:  # else calls are not what it costs
        return None
    if not all(each.room.whole is first.room.whole and each.ids.whole is first.ids.whole for each in indexes):
        return None
    of_each = [(len(each.entries) - 1, each.room.first, each.ids.first) for each in indexes]
    return _Place(*np.repeat(np.array(of_each).T, np.diff(starts), axis=1))


def insert_in_all(indexes: Sequence[SlotIndex], ids: Ids, starts: Sequence[int]) -> Entries:
    """Do what ``insert`` of each of ``indexes`` does for its part of ``ids``.

    Args:
        starts: where the part of each begins, and where that of the last ends.
    """
    parts = [slice(start, stop) for start, stop in itertools.pairwise(starts)]
    taken = [index.begin(ids[part]) for index, part in zip(indexes, parts, strict=True)]
    slots = taken[0] if len(taken) == 1 else np.concatenate(taken)
    place = _joint(indexes, starts)
    if place is not None and all(index.clean for index in indexes):
        _enter(indexes[0].room.whole, place, ids, slots, clean=True)
    else:
        for index, part in zip(indexes, parts, strict=True):
            index.enter(ids[part], slots[part])
    return slots


def _enter(entries: Entries, place: _Place, ids: Ids, slots: Entries, clean: bool) -> int:
    """Give each of ``slots``, which have ``ids``, an entry; return how many of these were ``DELETED``.

    Args:
        clean: whether there are none such.
    """
    at, deleted = _homes(ids, place.mask), 0
    while len(slots) > SINGLE:
        here = _moved(at, place.base)
        there = entries.take(here)
        open_ = np.flatnonzero(there < 0)
        # Of ids that want the same entry, the last gets it; the others see that they have not, and go on.
        entries.put(here[open_], slots[open_], mode="clip")
        own = entries.take(here) == slots
        if not clean:
            deleted += int(np.count_nonzero((there == DELETED) & own))
        left = np.flatnonzero(~own)
        place = place.of(left)
        at, slots = (at[left] + 1) & place.mask, slots[left]
    bases = 0 if place.base is None else place.base
    each = (np.broadcast_to(value, len(slots)).tolist() for value in (place.mask, bases))
    for home, slot, mask, base in zip(at.tolist(), slots.tolist(), *each, strict=True):
        while (entry := entries.item(base + home)) >= 0:
            home = (home + 1) & mask
        deleted += entry == DELETED
        entries[base + home] = slot
    return deleted


def _homes(ids: Ids, mask: int | Positions) -> Positions:
    """Return the entry at which the search for each id begins, in new memory."""
    homes: Positions = mixed(ids).view(np.int64)
    homes &= mask
    return homes


def find_in_all(indexes: Sequence[SlotIndex], ids: Ids, starts: Sequence[int]) -> Entries:
    """Return what ``find`` of each of ``indexes`` does for its part of ``ids``.

    Args:
        starts: where the part of each begins, and where that of the last ends.
    """
    place = _joint(indexes, starts)
    if place is not None:
        return _find(indexes[0].room.whole, indexes[0].ids.whole, ids, place)
    own = [ids[start:stop] for start, stop in itertools.pairwise(starts)]
    return np.concatenate([index.find(each) for index, each in zip(indexes, own, strict=True)])


def probe(entries: Entries, known: Ids, ids: Ids) -> Entries:
    """Return the slot of each of ``ids``, which may repeat and have any order; ``ABSENT`` where there is none.

    Args:
        entries: a power of two of slots, ``FREE`` or ``DELETED``. The search for an id begins at the entry of its hash,
            modulo their number, and ends at a free one.
        known: the id of each slot.
    """
    if not len(known):
        return np.full(len(ids), ABSENT, np.int32)
    return _find(entries, known, ids, _Place(len(entries) - 1))


def _find(entries: Entries, known: Ids, ids: Ids, place: _Place) -> Entries:
    slots = np.empty(len(ids), np.int32)
    for start in range(0, len(ids), CHUNK):
        part = slice(start, start + CHUNK)
        _probe(entries, known, ids[part], slots[part], place.of(part))
    return slots


def _probe(entries: Entries, known: Ids, ids: Ids, out: Entries, place: _Place) -> None:
    at = _homes(ids, place.mask)
    entries.take(_moved(at, place.base), out=out, mode="clip")
    left = np.flatnonzero(~_same(known, ids, out, place.first) & (out != FREE))
    if not len(left):
        return
    looked, most = 1, np.max(place.mask)
    place = place.of(left)
    at = at[left]
    while len(left) > FEW and looked <= most:  # in a damaged file, no entry may be free
        at += 1
        at &= place.mask
        out[left] = found = entries.take(_moved(at, place.base))
        more = np.flatnonzero(~_same(known, ids[left], found, place.first) & (found != FREE))
        left, at, place = left[more], at[more], place.of(more)
        looked += 1
    # The few that are left are looked for in windows, since calls are what it costs.
    place, at = place.column(), at[:, None]
    while len(left) and looked <= most:
        found = entries.take(_moved((at + _AHEAD) & place.mask, place.base))
        ends = _same(known, ids[left][:, None], found, place.first) | (found == FREE)
        first = ends.argmax(axis=1)
        rows = np.arange(len(left))
        out[left] = found[rows, first]
        more = np.flatnonzero(~ends[rows, first])
        left, at, place = left[more], at[more] + WINDOW, place.of(more)
        looked += WINDOW
    out[left] = ABSENT


def _same(known: Ids, ids: Ids, slots: Entries, first: Any) -> Flags:
    """Return whether each of ``slots`` is that of its id."""
    # A free entry is read as some slot; the id of that does not count, since the entry itself is looked at as well.
    same: Flags = known.take(_moved(slots, first), mode="clip") == ids
    same &= slots >= 0
    return same


def find_in_fixed(fixed: Sequence[FixedSlots], ids: Ids, starts: Sequence[int]) -> Positions:
    """Return what ``find`` of each of ``fixed``, which are of equally many stripes, does for its part of ``ids``.

    Args:
        starts: where the part of each begins, and where that of the last ends.
    """
    places, whole = fixed[0].places_of(ids), fixed[0].entries.whole
    if all(each.ordered for each in fixed):
        if not all(each.full for each in fixed):
            places[places >= np.repeat([each.top for each in fixed], np.diff(starts))] = ABSENT
        return places
    if len(whole) and all(each.entries.whole is whole for each in fixed):
        places += np.repeat([each.entries.first for each in fixed], np.diff(starts))
        slots = whole.take(places, mode="clip")
    else:
        slots = np.zeros(len(ids), np.int32)
        for each, (start, stop) in zip(fixed, itertools.pairwise(starts), strict=True):
            if each.most:
                each.entries.items.take(places[start:stop], out=slots[start:stop], mode="clip")
    return np.subtract(slots, 1, dtype=np.int64)


def slots_in(rows: int, stripe: int, stripes: int) -> int:
    return max(0, -(-(rows - stripe) // stripes))


class FixedSlots:
    """Stripe ``stripe`` of ``stripes`` of a table of ``rows`` rows; the interface is ``SlotIndex``'s.

    Slots are given in the order in which rows come. By their ids, rows that come at random would lie one to a page: of
    8,160 new rows of 256 bytes each would have the system add a page, where 510 are enough.

    Args:
        entries: for 1 + the slot of each place, of as many items as there can be rows; 0 is free. None: in memory of
            its own.
        places: for the place of each slot.

    Attributes:
        ordered: whether rows have come in the order of their ids, without a gap, as those of a table that is loaded.
            Then each slot is its place, and nothing is looked up.
    """

    def __init__(
        self, rows: int, stripe: int, stripes: int, entries: Slab | None = None, places: Slab | None = None
    ) -> None:
        self._stripe, self._stripes = stripe, stripes
        # For a power of two: a division takes longer.
        self._shift = stripes.bit_length() - 1 if not stripes & (stripes - 1) else None
        self.most = slots_in(rows, stripe, stripes)
        self.top = 0
        self.ordered = True
        self.entries = Slab(None, np.int32, self.most) if entries is None else entries
        self.entries.reserve(self.most)
        self.places = Slab(None, place_dtype(self.most), self.most) if places is None else places
        self.places.reserve(self.most)

    def __len__(self) -> int:
        return self.top

    @property
    def full(self) -> bool:
        return self.top == self.most

    @property
    def slab(self) -> Slab:
        """What lies by slot."""
        return self.places

    @property
    def nbytes(self) -> int:
        return 4 * self.most + int(self.places.item_bytes) * self.top

    def find(self, ids: Ids) -> Positions:
        """Return the slot of each id, ``ABSENT`` for those whose row is not made yet."""
        return find_in_fixed([self], ids, [0, len(ids)])

    def insert(self, ids: Ids) -> Positions:
        """Give a slot to each of ``ids``, none of which has one or is there twice; return the slots."""
        return insert_in_fixed([self], ids, [0, len(ids)])

    def ids_of(self, slots: Positions | Entries) -> Ids:
        return self._ids_at(self.places.items.take(slots).astype(np.int64, copy=False))

    def missing(self) -> Ids:
        """Return the ids that have no slot, rising."""
        return self._ids_at(np.flatnonzero(self.entries.items[: self.most] == 0))

    def _ids_at(self, places: Positions) -> Ids:
        """Return the ids of ``places``, in the same memory."""
        places *= self._stripes
        places += self._stripe
        return places

    def slots(self) -> Positions:
        """Return the slots of all rows that are made, rising."""
        return np.arange(self.top)

    def remove(self, slots: Entries) -> None:
        raise AssertionError("a row of a table with a shape cannot go")

    def places_of(self, ids: Ids) -> Positions:
        """Return which of the rows here each of ``ids`` is, counted from 0 in the order of ids; in new memory."""
        if self._shift is not None:
            return np.right_shift(ids, self._shift, dtype=np.int64)
        return np.floor_divide(ids, self._stripes, dtype=np.int64)


def place_dtype(most: int) -> type[np.int32 | np.int64]:
    return np.int32 if most < MOST_SLOTS else np.int64


def insert_in_fixed(fixed: Sequence[FixedSlots], ids: Ids, starts: Sequence[int]) -> Positions:
    """Do what ``insert`` of each of ``fixed``, which are of equally many stripes, does for its part of ``ids``."""
    counts = np.diff(starts)
    for each, count in zip(fixed, counts.tolist(), strict=True):
        if each.top + count > MOST_SLOTS:
            raise UsageError(f"a server holds at most {MOST_SLOTS} rows of a table: start more servers")
    places = fixed[0].places_of(ids)
    slots = np.arange(len(ids))
    slots += np.repeat(np.subtract([each.top for each in fixed], starts[:-1]), counts)
    for each, (start, stop) in zip(fixed, itertools.pairwise(starts), strict=True):
        each.ordered = each.ordered and np.array_equal(slots[start:stop], places[start:stop])
        each.top += stop - start
        each.places.fill(each.top)
    entries, known = fixed[0].entries.whole, fixed[0].places.whole
    if all(each.entries.whole is entries and each.places.whole is known for each in fixed):
        entries[places + np.repeat([each.entries.first for each in fixed], counts)] = slots + 1
        known[slots + np.repeat([each.places.first for each in fixed], counts)] = places
    else:
        for each, (start, stop) in zip(fixed, itertools.pairwise(starts), strict=True):
            each.entries.items[places[start:stop]] = slots[start:stop] + 1
            each.places.items[slots[start:stop]] = places[start:stop]
    return slots
