"""Parcels: which messages a list of keys takes, and which elements of which arrays each of them carries. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from kvstore.cached import cached
from kvstore.client.plans.entries import DTYPES, Entries, Entry, Segment
from kvstore.spec import ITEMSIZE, Key, sum_dtype
from kvstore.values import many_small
from kvstore.values.addresses import Column

MOST_SEGMENTS = 1 << 17  # in one message: their numbers, and descriptions of their states, must fit its header

Flags: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.bool_]]"

_ITEMSIZES = np.array(list(ITEMSIZE.values()), np.int64)


class PayloadSource(NamedTuple):
    """What one payload is made from: elements ``start`` to ``stop`` of an array, or several whole arrays."""

    keys: tuple[Key, ...]
    start: int
    stop: int
    segments: int


class ArrayRange(NamedTuple):
    """Elements ``start`` to ``stop`` of the array at ``position`` in the list; ``whole`` if that is all of it."""

    position: int
    start: int
    stop: int
    whole: bool


class SegmentTable:
    """A list of keys, and all their segments in order.

    Attributes:
        keys: the list.
        specs: of the arrays, each once.
        places, kinds, sizes, cut: by position in the list: the key's place, the index of its array's spec in ``specs``,
            the number of elements, and whether there are several segments.
        positions: by segment, that of its array in the list.
        ids, servers, starts, stops: by segment; see ``Segment``.
        dtypes: by segment, the code of its dtype; see ``DTYPES``.
    """

    def __init__(self, entries: Entries, keys: Sequence[Key]) -> None:
        self.entries = entries
        self.keys = keys
        self.places: Column = np.fromiter(map(entries.places.__getitem__, keys), np.int64, len(keys))
        used, self.kinds = np.unique(entries.kinds[self.places], return_inverse=True)
        self.specs = [entries.specs[kind] for kind in used.tolist()]
        self.sizes = np.array([spec.size for spec in self.specs], np.int64)[self.kinds]
        codes = np.array([DTYPES.index(spec.dtype) for spec in self.specs], np.int64)[self.kinds]
        counts = entries.counts[self.places]
        self.cut = counts > 1
        self.positions = np.repeat(np.arange(len(keys)), counts)
        before = np.cumsum(counts) - counts  # segments of the arrays before
        segments = (entries.firsts[self.places] - before)[self.positions] + np.arange(len(self.positions))
        self.ids, self.servers = entries.ids[segments], entries.servers[segments]
        self.starts, self.stops = entries.starts[segments], entries.stops[segments]
        self.dtypes = codes[self.positions]

    def small(self, most: int) -> Flags:
        """Return, by segment, whether it is a whole array of at most ``most`` elements."""
        return (~self.cut & (self.sizes <= most))[self.positions]


class Parcel:
    """What one message carries: segments of one dtype on one server, back to back; adjacent ones merge into ranges.

    Args:
        table: the list of keys.
        numbers: which of its segments, in order; at least one.
        small: whole arrays of at most so many elements share payloads.

    Attributes:
        server, dtype: of all segments.
        ids: of the segments.
        places: of the segments' keys, among those of the store.
        positions, begins, ends: of the ranges; see ``ArrayRange``.
        size, nbytes: elements and bytes of all segments.
    """

    def __init__(self, table: SegmentTable, numbers: Column, small: int = 0) -> None:
        self.small = small
        self.server = int(table.servers[numbers[0]])
        self.dtype = DTYPES[table.dtypes[numbers[0]]]
        self.ids: list[int] = table.ids[numbers].tolist()
        positions, starts, stops = table.positions[numbers], table.starts[numbers], table.stops[numbers]
        self.places = table.places[positions]
        self.size = int((stops - starts).sum())
        self.nbytes = self.size * ITEMSIZE[self.dtype]
        new = np.ones(len(numbers), bool)  # a range begins
        new[1:] = (positions[1:] != positions[:-1]) | (starts[1:] != stops[:-1])
        firsts = np.flatnonzero(new)
        self.positions, self.begins = positions[firsts], starts[firsts]
        self.ends = stops[np.append(firsts[1:], len(numbers)) - 1]
        self._table = table
        self._numbers = numbers

    @property
    def sum_bytes(self) -> int:
        """Bytes of sums of its arrays."""
        return self.size * ITEMSIZE[sum_dtype(self.dtype)]

    @cached
    def many(self) -> bool:
        """Whether its ranges are faster to copy in one step of numpy's than one by one."""
        return many_small(len(self.positions), self.nbytes)

    @cached
    def offsets(self) -> Column:
        """For each range, where in its array it begins, in bytes."""
        return self.begins * ITEMSIZE[self.dtype]

    @cached
    def lengths(self) -> Column:
        """Bytes of each range."""
        lengths: Column = (self.ends - self.begins) * ITEMSIZE[self.dtype]
        return lengths

    @cached
    def segments(self) -> list[Segment]:
        """See ``Segment``."""
        table = self._table
        columns = (table.positions, table.servers, table.starts, table.stops)
        lists = (column[self._numbers].tolist() for column in columns)
        return [
            Segment(number, server, table.keys[position], start, stop)
            for number, position, server, start, stop in zip(self.ids, *lists, strict=True)
        ]

    @cached
    def entries(self) -> list[Entry]:
        """What is known of the key of each segment."""
        return [self._table.entries[segment.key] for segment in self.segments]

    @cached
    def sizes(self) -> list[int]:
        """How many elements each segment has."""
        return [segment.stop - segment.start for segment in self.segments]

    def keys(self) -> list[Key]:
        """Return the key of each segment."""
        return list(map(self._table.keys.__getitem__, self._table.positions[self._numbers].tolist()))

    def shapes(self) -> tuple[list[int], list[list[int]]]:
        """Return for each segment the index of its shape, and the shapes; a segment of a cut array is flat."""
        table = self._table
        positions = table.positions[self._numbers]
        sizes = (table.stops - table.starts)[self._numbers]
        specs = table.specs
        codes = np.where(table.cut[positions], len(specs) + sizes, table.kinds[positions])
        distinct, kinds = np.unique(codes, return_inverse=True)
        shapes = [list(specs[code].shape) if code < len(specs) else [code - len(specs)] for code in distinct.tolist()]
        return kinds.tolist(), shapes

    @cached
    def ranges(self) -> list[ArrayRange]:
        """See ``ArrayRange``."""
        whole = self.ends - self.begins == self._table.sizes[self.positions]
        lists = (column.tolist() for column in (self.positions, self.begins, self.ends, whole))
        return [ArrayRange(*numbers) for numbers in zip(*lists, strict=True)]

    def is_small(self, entry: Entry) -> bool:
        """Whether an array shares payloads."""
        return bool(self.small) and not entry.cut and entry.spec.size <= self.small

    @cached
    def sources(self) -> list[PayloadSource]:
        """What each payload is made from, in order."""
        made: list[PayloadSource] = []
        shared = False
        for key, start, stop, small, segments in self._by_range():
            if small and shared:
                last = made.pop()
                made.append(PayloadSource((*last.keys, key), 0, last.stop + stop, last.segments + segments))
            else:
                made.append(PayloadSource((key,), start, stop, segments))
            shared = small
        return made

    def _by_range(self) -> Iterator[tuple[Key, int, int, bool, int]]:
        """Yield the key, start and stop of each range, whether its array is small, and how many segments it is."""
        at = 0
        for _, start, stop, _ in self.ranges:
            first = self.segments[at]
            small = self.is_small(self.entries[at])
            count = 1
            while self.segments[at + count - 1].stop < stop:
                count += 1
            yield first.key, start, stop, small, count
            at += count


def parcels(entries: Entries, keys: Sequence[Key], most: int, small: int = 0) -> list[Parcel]:
    """Return the messages that ``keys`` take; see ``pack``."""
    return pack(SegmentTable(entries, keys), most, small)


def pack(table: SegmentTable, most: int, small: int = 0) -> list[Parcel]:
    """Return the messages that a list of keys takes: each of at most ``most`` bytes or one segment, servers in turns.

    None has more than ``MOST_SEGMENTS``. In each, whole arrays of at most ``small`` elements come first, so that they
    can share a payload.
    """
    nbytes = (table.stops - table.starts) * _ITEMSIZES[table.dtypes]
    where = table.servers * len(DTYPES) + table.dtypes
    order = np.argsort(where, kind="stable")
    borders = np.flatnonzero(np.diff(where[order])) + 1
    by_server: dict[int, list[Column]] = {}
    for alike in np.split(order, borders):
        for numbers in _filled(alike, nbytes[alike], most):
            by_server.setdefault(int(table.servers[numbers[0]]), []).append(numbers)
    for messages in by_server.values():
        messages.sort(key=lambda numbers: int(numbers[0]))
    turns = itertools.zip_longest(*(by_server[server] for server in sorted(by_server)))
    ordered = [numbers for turn in turns for numbers in turn if numbers is not None]
    if small:
        last = ~table.small(small)
        ordered = [numbers[np.argsort(last[numbers], kind="stable")] for numbers in ordered]
    return [Parcel(table, numbers, small) for numbers in ordered]


def _filled(numbers: Column, nbytes: Column, most: int) -> Iterator[Column]:
    """Yield the numbers for each message: as many as fit in ``most`` bytes, and at least one that is not empty."""
    ends = np.cumsum(nbytes)
    start = 0
    while start < len(numbers):
        before = int(ends[start] - nbytes[start])
        filled = int(np.searchsorted(ends, before, "right")) + 1  # at least the first that is not empty
        stop = max(filled, int(np.searchsorted(ends, before + most, "right")))
        stop = min(stop, start + MOST_SEGMENTS, len(numbers))
        yield numbers[start:stop]
        start = stop
