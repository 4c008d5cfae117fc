"""Which slot the row of an id has: a hash table in numpy, with open addressing. Pure.

An entry is the number of a slot, and the ids lie in a slab by slot, so any id can be stored, and an entry has 4 bytes.
Entries are found by linear probing, thousands of ids at a time: each step looks at the next entry of all that are left.
Between a quarter and a half of the entries are used, but for a new or a shrunk index.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from kvstore.errors import UsageError
from kvstore.rows.ids import Hashes, Ids, mixed
from kvstore.rows.slabs import Slab

Entries: TypeAlias = "np.ndarray[Any, np.dtype[np.int32]]"
Positions: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

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
    """See the module. Slots of ids that have been removed are used again, the last first."""

    def __init__(self) -> None:
        self.ids = Slab(None, np.int64)
        self.top = 0
        self.entries: Entries = np.full(LEAST, FREE, np.int32)
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
        slots = self.begin(ids)
        hashes = mixed(ids)
        for start in range(0, len(ids), CHUNK):
            self._place(hashes[start : start + CHUNK], slots[start : start + CHUNK])
        return slots

    def begin(self, ids: Ids) -> Entries:
        """Begin to ``insert``: what is left is to give each of the slots that are returned an entry."""
        count = len(ids)
        if self._used + count > MOST_SLOTS:
            raise UsageError(f"a server holds at most {MOST_SLOTS} rows of a table: start more servers, or evict rows")
        if (self._used + self._deleted + count) * 2 > len(self.entries):
            self._rebuild(self._used + count)
        slots = self._take_slots(count)
        self.ids.items[slots] = ids
        self._used += count
        return slots

    def _take_slots(self, count: int) -> Entries:
        taken: list[Entries] = []
        while count and self._released:
            batch = self._released.pop()
            taken.append(batch[max(0, len(batch) - count) :])
            if len(batch) > count:
                self._released.append(batch[: len(batch) - count])
            count -= len(taken[-1])
        if count or not taken:
            taken.append(np.arange(self.top, self.top + count, dtype=np.int32))
            self.top += count
            self.ids.reserve(self.top)
            self.ids.fill(self.top)
        return taken[0] if len(taken) == 1 else np.concatenate(taken)

    def _place(self, hashes: Hashes, slots: Entries) -> None:
        entries, mask = self.entries, len(self.entries) - 1
        at = _homes(hashes, mask)
        while len(slots) > SINGLE:
            there = entries.take(at)
            open_ = there < 0
            # Of ids that want the same entry, the last gets it; the others see that they have not, and go on.
            entries[at[open_]] = slots[open_]
            left = entries.take(at) != slots
            if self._deleted:
                self._deleted -= int(np.count_nonzero((there == DELETED) & ~left))
            at, slots = (at[left] + 1) & mask, slots[left]
        for home, slot in zip(at.tolist(), slots.tolist(), strict=True):
            self.place(home, slot)

    def place(self, home: int, slot: int) -> None:
        """Give ``slot`` the first entry from ``home`` on that is open."""
        entries = self.entries
        while (entry := entries.item(home)) >= 0:
            home = (home + 1) & (len(entries) - 1)
        self._deleted -= entry == DELETED
        entries[home] = slot

    def remove(self, slots: Entries) -> None:
        """Take ids out, by their slots, each of which is in use and given once."""
        entries, mask = self.entries, len(self.entries) - 1
        at, left = _homes(mixed(self.ids.items[slots]), mask), slots
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
        self.entries = np.full(wanted, FREE, np.int32)
        self._deleted = 0
        for start in range(0, len(used), CHUNK):
            part = used[start : start + CHUNK]
            self._place(mixed(self.ids.items[part]), part)


def _homes(hashes: Hashes, mask: int) -> Positions:
    """Return the entry at which the search for each id begins, in new memory."""
    homes: Positions = (hashes & np.uint64(mask)).view(np.int64)
    return homes


def insert_in_all(indexes: Sequence[SlotIndex], ids: Ids, starts: Sequence[int]) -> Entries:
    """Do what ``insert`` of each of ``indexes`` does for its part of ``ids``, with few calls for each of them.

    Args:
        starts: where the part of each begins, and where that of the last ends.
    """
    parts = [slice(start, stop) for start, stop in itertools.pairwise(starts)]
    if starts[-1] > len(indexes) * CHUNK or not all(index.clean for index in indexes):  # calls are not what it costs
        return np.concatenate([index.insert(ids[part]) for index, part in zip(indexes, parts, strict=True)])
    slots = np.concatenate([index.begin(ids[part]) for index, part in zip(indexes, parts, strict=True)])
    masks = np.repeat([len(index.entries) - 1 for index in indexes], np.diff(starts))
    at, left = mixed(ids).view(np.int64) & masks, np.arange(len(ids))
    while len(left) > SINGLE:  # as in ``SlotIndex._place``
        bounds = np.searchsorted(left, starts).tolist()
        here, own = at[left], slots[left]
        there = np.empty(len(left), np.int32)
        for index, (start, stop) in zip(indexes, itertools.pairwise(bounds), strict=True):
            index.entries.take(here[start:stop], out=there[start:stop], mode="clip")
        open_ = np.flatnonzero(there < 0)
        open_at, open_slots = here[open_], own[open_]
        open_bounds = np.searchsorted(open_, bounds).tolist()
        each = zip(indexes, itertools.pairwise(bounds), itertools.pairwise(open_bounds), strict=True)
        for index, (start, stop), (first, last) in each:
            index.entries.put(open_at[first:last], open_slots[first:last], mode="clip")
            index.entries.take(here[start:stop], out=there[start:stop], mode="clip")
        left = left[there != own]
        at[left] = (at[left] + 1) & masks[left]
    which = np.searchsorted(starts, left, side="right") - 1
    for number, home, slot in zip(which.tolist(), at[left].tolist(), slots[left].tolist(), strict=True):
        indexes[number].place(home, slot)
    return slots


def find_in_all(indexes: Sequence[SlotIndex], whole: Ids, starts: Sequence[int]) -> Entries:
    """Return what ``find`` of each of ``indexes`` does for its part of ``whole``, with few calls for each of them.

    What is computed of hashes, and of what the entries say, is computed of all ids together.

    Args:
        starts: where the part of each begins, and where that of the last ends.
    """
    if starts[-1] > len(indexes) * CHUNK or not starts[-1]:  # calls are not what it costs
        own = [whole[start:stop] for start, stop in itertools.pairwise(starts)]
        return np.concatenate([index.find(each) for index, each in zip(indexes, own, strict=True)])
    masks = np.repeat([len(index.entries) - 1 for index in indexes], np.diff(starts))
    at = mixed(whole).view(np.int64) & masks
    out = np.full(len(whole), ABSENT, np.int32)
    there = np.zeros(len(whole), np.int64)  # the ids that the entries say
    parts = [slice(start, stop) for start, stop in itertools.pairwise(starts)]
    for index, part in zip(indexes, parts, strict=True):
        if index.top and part.start < part.stop:
            index.entries.take(at[part], out=out[part], mode="clip")
            index.ids.items.take(out[part], out=there[part], mode="clip")
    same = there == whole
    same &= out >= 0
    left = np.flatnonzero(~same & (out != FREE))
    if len(left):
        windows = (at[left][:, None] + _AHEAD) & masks[left][:, None]
        _find_far_in_all(indexes, whole, out, left, windows, np.searchsorted(left, starts).tolist())
    return out


def _find_far_in_all(
    indexes: Sequence[SlotIndex], ids: Ids, out: Entries, left: Positions, windows: Positions, starts: Sequence[int]
) -> None:
    """Look for the ids at ``left`` in the entries ``windows`` of each; ``starts``: where each index's ids begin."""
    found = np.empty(windows.shape, np.int32)
    there = np.empty(windows.shape, np.int64)
    parts = [slice(start, stop) for start, stop in itertools.pairwise(starts)]
    for index, part in zip(indexes, parts, strict=True):
        if part.start < part.stop:
            index.entries.take(windows[part], out=found[part], mode="clip")
            index.ids.items.take(found[part], out=there[part], mode="clip")
    same = there == ids[left][:, None]
    same &= found >= 0
    ends = same | (found == FREE)
    first = ends.argmax(axis=1)
    rows = np.arange(len(left))
    out[left] = found[rows, first]
    more = np.flatnonzero(~ends[rows, first])
    if len(more):
        for index, which in zip(indexes, np.split(more, np.searchsorted(more, starts[1:-1])), strict=True):
            if len(which):
                far = left[which], windows[which, -1]
                _probe_far(index.entries, index.ids.items, ids, out, far, 1 + WINDOW)


def probe(entries: Entries, known: Ids, ids: Ids) -> Entries:
    """Return the slot of each of ``ids``, which may repeat and have any order; ``ABSENT`` where there is none.

    Args:
        entries: a power of two of slots, ``FREE`` or ``DELETED``. The search for an id begins at the entry of its hash,
            modulo their number, and ends at a free one.
        known: the id of each slot.
    """
    slots = np.full(len(ids), ABSENT, np.int32)
    if len(known):
        for start in range(0, len(ids), CHUNK):
            _probe(entries, known, ids[start : start + CHUNK], slots[start : start + CHUNK])
    return slots


def _probe(entries: Entries, known: Ids, ids: Ids, out: Entries) -> None:
    mask = len(entries) - 1
    at = _homes(mixed(ids), mask)
    entries.take(at, out=out, mode="clip")
    # A free entry is read as slot 0; the id of that does not count, since the entry itself is looked at as well.
    same = known.take(out, mode="clip") == ids
    same &= out >= 0
    left = np.flatnonzero(~same & (out != FREE))
    looked = 1
    while len(left) > FEW and looked <= mask:  # in a damaged file, no entry may be free
        at_left = at[left]
        at_left += 1
        at_left &= mask
        at[left] = at_left
        found = entries.take(at_left)
        out[left] = found
        same = known.take(found, mode="clip") == ids[left]
        same &= found >= 0
        left = left[~same & (found != FREE)]
        looked += 1
    if len(left):
        _probe_far(entries, known, ids, out, (left, at[left]), looked)


def _probe_far(
    entries: Entries, known: Ids, ids: Ids, out: Entries, left: tuple[Positions, Positions], looked: int
) -> None:
    """Look for a few ids, ``left``, from the entries after those on: in windows, since calls are what it costs."""
    mask = len(entries) - 1
    which, at = left
    while len(which) and looked <= mask:
        found = entries.take((at[:, None] + _AHEAD) & mask)
        same = known.take(found, mode="clip") == ids[which][:, None]
        same &= found >= 0
        ends = same | (found == FREE)
        first = ends.argmax(axis=1)
        rows = np.arange(len(which))
        out[which] = found[rows, first]
        more = ~ends[rows, first]
        which, at = which[more], at[more] + WINDOW
        looked += WINDOW
    out[which] = ABSENT


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
        ids = self.places.items.take(slots).astype(np.int64, copy=False)
        ids *= self._stripes
        ids += self._stripe
        return ids

    def missing(self) -> Ids:
        """Return the ids that have no slot, rising."""
        ids: Ids = np.flatnonzero(self.entries.items[: self.most] == 0)
        ids *= self._stripes
        ids += self._stripe
        return ids

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
        own, own_places = slots[start:stop], places[start:stop]
        each.ordered = each.ordered and np.array_equal(own, own_places)
        each.top += len(own)
        each.places.fill(each.top)
        each.places.items[each.top - len(own) : each.top] = own_places
        each.entries.items[own_places] = own + 1
    return slots
