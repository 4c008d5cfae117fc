"""What a list of keys means: where its arrays or tables are, and which messages it takes. Pure.

A ``Plan`` is of arrays, a ``RowPlan`` of tables. Both are kept, so a list that comes again costs no look at each key.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from kvstore.cached import cached
from kvstore.client.entries import DTYPES, Entries, Entry, Segment
from kvstore.errors import Mismatch
from kvstore.rows.layout import ALIGNED, part_bytes
from kvstore.spec import FLOATS, ITEMSIZE, Key, Spec, sum_dtype, without_value
from kvstore.table import Table
from kvstore.values import Arrays, Layout, many_small, outputs_of, values_of
from kvstore.values.any_arrays import Column

# ---- messages for arrays

MOST_SEGMENTS = 1 << 17  # in one message: their numbers, and descriptions of their states, must fit its header

Flags: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.bool_]]"

PARTS = 16  # pieces of a store on each server
_ITEMSIZES = np.array(list(ITEMSIZE.values()), np.int64)


@dataclass(frozen=True)
class Pieces:
    """How many bytes a message should have, which is the largest piece that an array goes in.

    A server answers when it has a piece from each worker. Until then its line is idle, and the round ends later by as
    much. A worker's line carries one piece for each server first, so that delay is the time of servers × piece bytes.
    In small stores pieces are therefore small. In large ones they are as large as is good for the processors.
    """

    most: int  # bytes of a piece
    least: int = 0  # bytes of a piece, however small the store; 0 if all pieces are to be of ``most``
    servers: int = 1  # how many there are

    def of(self, nbytes: int) -> int:
        if not self.least:
            return self.most
        return max(min(self.least, self.most), min(self.most, nbytes // (PARTS * self.servers)))


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
    """A list of keys, and all their segments in order."""

    def __init__(self, entries: Entries, keys: Sequence[Key]) -> None:
        self.entries = entries
        self.keys = keys
        # places, kinds, sizes, cut: by position in the list: the key's place, the index of its array's spec in
        # ``specs``, the number of elements, and whether there are several segments
        self.places: Column = np.fromiter(map(entries.places.__getitem__, keys), np.int64, len(keys))
        used, self.kinds = np.unique(entries.kinds[self.places], return_inverse=True)
        self.specs = [entries.specs[kind] for kind in used.tolist()]  # of the arrays, each once
        self.sizes = np.array([spec.size for spec in self.specs], np.int64)[self.kinds]
        codes = np.array([DTYPES.index(spec.dtype) for spec in self.specs], np.int64)[self.kinds]
        counts = entries.counts[self.places]
        self.cut = counts > 1
        self.positions = np.repeat(np.arange(len(keys)), counts)  # by segment, that of its array in the list
        before = np.cumsum(counts) - counts  # segments of the arrays before
        segments = (entries.firsts[self.places] - before)[self.positions] + np.arange(len(self.positions))
        # ids, servers, starts, stops: by segment; see ``Segment``
        self.ids, self.servers = entries.ids[segments], entries.servers[segments]
        self.starts, self.stops = entries.starts[segments], entries.stops[segments]
        self.dtypes = codes[self.positions]  # by segment, the code of its dtype; see ``DTYPES``

    def small(self, most: int) -> Flags:
        """Return, by segment, whether it is a whole array of at most ``most`` elements."""
        return (~self.cut & (self.sizes <= most))[self.positions]


class Parcel:
    """What one message carries: segments of one dtype on one server, back to back; adjacent ones merge into ranges.

    Args:
        table: the list of keys.
        numbers: which of its segments, in order; at least one.
        small: whole arrays of at most so many elements share payloads.
    """

    def __init__(self, table: SegmentTable, numbers: Column, small: int = 0) -> None:
        self.small = small
        self.server = int(table.servers[numbers[0]])  # server, dtype: of all segments
        self.dtype = DTYPES[table.dtypes[numbers[0]]]
        self.ids: list[int] = table.ids[numbers].tolist()
        positions, starts, stops = table.positions[numbers], table.starts[numbers], table.stops[numbers]
        self.places = table.places[positions]  # of the segments' keys, among those of the store
        self.size = int((stops - starts).sum())  # size, nbytes: elements and bytes of all segments
        self.nbytes = self.size * ITEMSIZE[self.dtype]
        new = np.ones(len(numbers), bool)  # a range begins
        new[1:] = (positions[1:] != positions[:-1]) | (starts[1:] != stops[:-1])
        firsts = np.flatnonzero(new)
        # positions, begins, ends: of the ranges; see ``ArrayRange``
        self.positions, self.begins = positions[firsts], starts[firsts]
        self.ends = stops[np.append(firsts[1:], len(numbers)) - 1]
        self._table = table
        self._numbers = numbers

    @property
    def sum_bytes(self) -> int:
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
        lengths: Column = (self.ends - self.begins) * ITEMSIZE[self.dtype]
        return lengths

    @cached
    def segments(self) -> list[Segment]:
        table = self._table
        columns = (table.positions, table.servers, table.starts, table.stops)
        lists = (column[self._numbers].tolist() for column in columns)
        return [
            Segment(number, server, table.keys[position], start, stop)
            for number, position, server, start, stop in zip(self.ids, *lists, strict=True)
        ]

    @cached
    def entries(self) -> list[Entry]:
        return [self._table.entries[segment.key] for segment in self.segments]

    @cached
    def sizes(self) -> list[int]:
        return [segment.stop - segment.start for segment in self.segments]

    def keys(self) -> list[Key]:
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
        whole = self.ends - self.begins == self._table.sizes[self.positions]
        lists = (column.tolist() for column in (self.positions, self.begins, self.ends, whole))
        return [ArrayRange(*numbers) for numbers in zip(*lists, strict=True)]

    def is_small(self, entry: Entry) -> bool:
        """Whether an array shares payloads."""
        return bool(self.small) and not entry.cut and entry.spec.size <= self.small

    @cached
    def sources(self) -> list[PayloadSource]:
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

    @cached
    def runs(self) -> list[list[int]]:
        """What the ranges are of which some rows travel: number of segments, first element, elements of a row."""
        widths = {spec: spec.size // spec.shape[0] for spec in self._table.specs}
        specs = [self._table.specs[kind] for kind in self._table.kinds[self.positions].tolist()]
        return [[source.segments, source.start, widths[spec]] for source, spec in zip(self.sources, specs, strict=True)]

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
    # In the order of the list again, which the dtypes have broken up.
    for messages in by_server.values():
        messages.sort(key=lambda numbers: int(numbers[0]))
    # Servers take turns, so that all have something to do from the first message on.
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


# ---- plans of arrays

MOST = 1 << 20  # keys in all plans that are kept
PLAN = 64  # keys that take as much memory as a plan without any
_KEYS = {int, str}


class Plan:
    """What to do for ``keys``, each of which is listed once.

    Args:
        most: bytes that a message should have.
        small: elements of arrays that share payloads; see ``pack``.
    """

    def __init__(self, entries: Entries, keys: Sequence[Key], most: int, small: int = 0, weight: float = 1.0) -> None:
        table = SegmentTable(entries, keys)
        self.keys = tuple(keys)
        self.places = table.places
        self.parcels = pack(table, most, small)
        # what a byte counts in the send window, which has room for a number of messages of the usual size
        self.weight = weight
        self.layout = Layout(table.kinds, table.specs)  # what arrays are to be
        self.floats = all(spec.dtype in FLOATS for spec in table.specs)  # whether all are of floating point
        self._table = table

    def values(self, arrays: Any) -> Arrays | None:
        """Return ``arrays`` as values if there is one for each key and ``values_of`` takes them; else None."""
        return values_of(arrays, self.layout) if self._has_all(arrays) else None

    def outputs(self, arrays: Any) -> Arrays | None:
        return outputs_of(arrays, self.layout) if self._has_all(arrays) else None

    def _has_all(self, arrays: Any) -> bool:
        return type(arrays) in (list, tuple) and len(arrays) == len(self.keys)

    @cached
    def specs(self) -> list[Spec]:
        return list(map(self._table.specs.__getitem__, self._table.kinds.tolist()))


def views_of(parcel: Parcel, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return flat views of the ranges of contiguous ``tensors`` that are in ``parcel``."""
    views: list[torch.Tensor] = []
    for position, start, stop, whole in parcel.ranges:
        tensor = tensors[position]
        flat = tensor if tensor.dim() == 1 else tensor.view(-1)
        views.append(flat if whole else flat[start:stop])
    return views


# ---- plans of tables

KEPT = 1 << 10  # plans
NARROW = 2**31  # ids below this travel in 32 bits


class RowParcel:
    """The stripes of a list of tables that one server has: a message carries rows of these."""

    def __init__(self, server: int, entries: Sequence[Entry]) -> None:
        self.server = server
        self.nbytes = 0  # which rows travel is not known before the call
        # of each table, the one on this server
        self.segments: list[Segment] = [entry.segments[server] for entry in entries]
        self.entries = list(entries)  # what is known of each table
        self.ids = [segment.id for segment in self.segments]
        # of the tables, among the store's keys
        self.places: Column = np.array([entry.place for entry in entries], np.int64)


class RowPlan:
    """What to do for a list of tables, each of which is listed once."""

    def __init__(self, entries: Entries, keys: Iterable[Key]) -> None:
        self.keys = tuple(keys)
        known = [entries[key] for key in self.keys]
        self.tables: list[Table] = [entries.tables[key] for key in self.keys]
        self.names = tuple(table.name(key) for table, key in zip(self.tables, self.keys, strict=True))
        # shapes, dtypes: of each; None for the shape of one that grows
        self.shapes = [None if table.rows is None else (table.rows, *table.row) for table in self.tables]
        self.dtypes: list[torch.dtype] = [getattr(torch, table.dtype) for table in self.tables]
        # of the elements of each, and the shape of its rows
        self.formats = [(dtype, table.row) for dtype, table in zip(self.dtypes, self.tables, strict=True)]
        # the positions of tables of half precision
        self.halves = [place for place, table in enumerate(self.tables) if table.sum_dtype != table.dtype]
        self.grow = any(table.grows for table in self.tables)
        every = np.iinfo(np.int64)
        # least, greatest: the ids that rows of each can have
        self.least = np.array([every.min if table.rows is None else 0 for table in self.tables])
        self.greatest = np.array([every.max if table.rows is None else table.rows - 1 for table in self.tables])
        # of the tables, among the store's keys
        self.places: Column = np.array([entry.place for entry in known], np.int64)
        self.servers = len(known[0].segments)
        # for each server, the stripes that it has
        self.parcels = [RowParcel(server, known) for server in range(self.servers)]
        # whether ids need more than 32 bits
        self.wide = any(table.rows is None or table.rows > NARROW for table in self.tables)
        self.codecs = [table.codec for table in self.tables]  # how the rows of each travel
        alike = {(table.dtype, table.width, table.codec) for table in self.tables}
        first = self.tables[0]
        whole = len(alike) == 1 and first.codec == "none" and first.row_bytes % ALIGNED == 0
        # one row, if those of all tables are alike and lie back to back in messages, as they are; else None
        self.item = np.dtype((np.void, first.row_bytes)) if whole else None

    def lengths(self, counts: Sequence[int], sums: bool = False) -> list[int]:
        """Return the bytes of so many rows of each table; ``sums``: of their sums, which have not been rounded."""
        return [
            part_bytes(count, table.width, table.sum_dtype if sums else table.dtype, table.codec)
            for table, count in zip(self.tables, counts, strict=True)
        ]

    def nbytes(self, counts: Sequence[int]) -> int:
        return sum(self.lengths(counts)) if self.item is None else sum(counts) * self.item.itemsize


# ---- all plans of a store


class Plans:
    """Makes plans, and keeps them: a list of keys that comes again costs no look at each of them."""

    def __init__(self, pieces: Pieces) -> None:
        self.entries = Entries()  # what is known of each key that this worker has passed to ``init``
        self._pieces = pieces
        self._fold, self._small = 1, 0
        self._made: dict[tuple[Key, ...], Plan] = {}
        self._kept = 0
        self._of_tables: dict[tuple[Key, ...], RowPlan] = {}
        self._whole: dict[tuple[Key, ...], Plan] = {}

    def fold(self, times: int, small: int) -> None:
        """From now on let messages be of so many times more bytes, and arrays of so few elements share payloads."""
        self._fold, self._small = times, small
        self._forget()

    def arrays(self, keys: Iterable[Key]) -> Plan:
        """Return the plan for keys of arrays, each of which is listed once."""
        listed = tuple(keys)
        plan = self._made.get(listed)
        if plan is None:
            for key in listed:
                if key not in self.entries:
                    raise without_value(key, self.entries, " on this worker")
                if key in self.entries.tables:
                    raise Mismatch(f"key {key!r} is {self.entries.tables[key]}: push and pull its rows by their ids")
            plan = self._make(listed)
        return plan

    def known(self, key: Any) -> Plan | None:
        """Return the plan for ``key``, or a list of keys, if all are of known arrays and each is listed once.

        None: not on the fast path; validate fully.
        """
        listed = tuple(key) if isinstance(key, list | tuple) else (key,)
        if not _KEYS.issuperset(map(type, listed)):  # 1.0 and True would be found as 1
            return None
        plan = self._made.get(listed)
        if plan is None and listed and self.entries.places.keys() >= (distinct := set(listed)):
            arrays = self.entries.tables.keys().isdisjoint(distinct)
            plan = self._make(listed) if arrays and len(distinct) == len(listed) else None
        return plan

    def whole(self, keys: Iterable[Key]) -> Plan:
        """Return the plan for keys of arrays of which some rows are pushed: one message for each server and dtype."""
        listed = tuple(keys)
        plan = self._whole.get(listed)
        if plan is None:
            if len(self._whole) >= KEPT:
                self._whole.clear()
            plan = self._whole[listed] = Plan(self.entries, self.arrays(listed).keys, sys.maxsize)
        return plan

    def tables(self, keys: Iterable[Key]) -> RowPlan:
        """Return the plan for keys of tables, each of which is listed once."""
        listed = tuple(keys)
        plan = self._of_tables.get(listed)
        if plan is None:
            for key in listed:
                self.table(key)
            if len(self._of_tables) >= KEPT:
                self._of_tables.clear()
            plan = self._of_tables[listed] = RowPlan(self.entries, listed)
        return plan

    def table(self, key: Key) -> Table:
        """Return the table of ``key``; raise ``KeyNotInitialized``, or ``Mismatch`` if it is the key of an array."""
        table = self.entries.tables.get(key)
        if table is not None:
            return table
        if key not in self.entries:
            raise without_value(key, self.entries, " on this worker")
        raise Mismatch(
            f"key {key!r} is {self.entries[key].spec}, an array: push and pull it as one, or init it with kv.Table"
        )

    def _make(self, listed: tuple[Key, ...]) -> Plan:
        if self._kept > MOST:
            self._forget()
        self._kept += PLAN + len(listed)
        piece = self._pieces.of(self.entries.nbytes)
        weight = self._pieces.most / piece
        plan = self._made[listed] = Plan(self.entries, listed, piece * self._fold, self._small, weight)
        return plan

    def _forget(self) -> None:
        self._made.clear()
        self._kept = 0
