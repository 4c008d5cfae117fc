"""What a worker knows of its store's keys: where they are, and how often each has been pushed. Pure.

All of it is in numpy columns, by a key's place in the store: a push of thousands of keys takes a few steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvstore.spec import ITEMSIZE, Key, Spec
from kvstore.table import Table, TableSpec
from kvstore.values.any_arrays import Column

DTYPES = tuple(ITEMSIZE)  # by the code that columns have


class Segment(NamedTuple):
    """Elements ``start`` to ``stop`` of the array of ``key``, which one server holds under the number ``id``."""

    id: int
    server: int
    key: Key
    start: int
    stop: int


@dataclass(frozen=True)
class Entry:
    """What a worker knows of a key; ``place`` is its number among the store's keys, the index of its clock."""

    spec: Spec
    segments: list[Segment]
    place: int = 0

    @property
    def cut(self) -> bool:
        return len(self.segments) > 1

    @property
    def servers(self) -> int:
        """How many servers hold some of it; a server may hold several segments."""
        return len({segment.server for segment in self.segments})


class SegmentColumns(NamedTuple):
    """Where arrays are: how many segments each has, and the columns of all segments, in order; see ``Segment``."""

    counts: Column
    ids: Column
    servers: Column
    starts: Column
    stops: Column


class Entries(Mapping[Key, Entry]):
    """The keys of one store, in the order in which they were added, and their segments."""

    def __init__(self) -> None:
        self.places: dict[Key, int] = {}  # by key, its number, from 0
        self.tables: dict[Key, Table] = {}  # by key, what the tables are; other keys have arrays
        # by the key of an array, the key of the table that has its rows now; see ``Table``
        self.moved: dict[Key, Key] = {}
        self.specs: list[Spec] = []  # of the arrays, each once
        # ends: by place, how many bytes the arrays up to this one have
        # firsts, counts: by place, the first of its segments, and how many they are
        # kinds: by place, which of ``specs`` the array has
        self.kinds, self.firsts, self.counts, self.ends = _NONE, _NONE, _NONE, _NONE
        # ids, servers, starts, stops: by segment; see ``Segment``
        self.ids, self.servers, self.starts, self.stops = _NONE, _NONE, _NONE, _NONE
        self._codes: dict[Spec, int] = {}

    @classmethod
    def of(cls, keys: Sequence[Key], kinds: Sequence[int], specs: Sequence[Spec], segments: SegmentColumns) -> Entries:
        """Return those of ``keys``, of which the i-th is an array of ``specs[kinds[i]]``."""
        made = cls()
        made._add(keys, np.array(kinds, np.int64), specs, segments)
        return made

    def add(self, others: Entries) -> None:
        """Add ``others``, none of which are here yet. If an exception ends this, it may be called again."""
        keys, segments = len(others), others.segments
        columns = (column[:segments] for column in (others.ids, others.servers, others.starts, others.stops))
        self._add(list(others), others.kinds[:keys], others.specs, SegmentColumns(others.counts[:keys], *columns))

    @property
    def segments(self) -> int:
        """How many segments all keys have; the columns have room for more."""
        last = len(self.places) - 1
        return int(self.firsts[last] + self.counts[last]) if self.places else 0

    @property
    def nbytes(self) -> int:
        """How many bytes all arrays have; tables have none."""
        return int(self.ends[len(self.places) - 1]) if self.places else 0

    @property
    def kind(self) -> type | None:
        return next((str if isinstance(key, str) else int for key in self.places), None)

    def _add(self, keys: Sequence[Key], kinds: Column, specs: Sequence[Spec], segments: SegmentColumns) -> None:
        if not keys or keys[0] in self.places:
            return
        place, segment = len(self.places), self.segments
        for spec in specs:
            if spec not in self._codes:
                self.specs[len(self._codes) :] = [spec]
                self._codes[spec] = len(self._codes)
        codes = np.array([self._codes[spec] for spec in specs], np.int64)
        for number, spec in enumerate(specs):
            if isinstance(spec, TableSpec):
                new = {keys[at]: spec.table for at in np.flatnonzero(kinds == number).tolist()}
                self.tables |= new
                self.moved |= {table.parameter: key for key, table in new.items() if table.parameter is not None}
        self.kinds = _written(self.kinds, place, codes[kinds])
        sizes = np.array([0 if isinstance(spec, TableSpec) else spec.nbytes for spec in specs], np.int64)[kinds]
        self.ends = _written(self.ends, place, self.nbytes + np.cumsum(sizes))
        self.firsts = _written(self.firsts, place, segment + np.cumsum(segments.counts) - segments.counts)
        self.counts = _written(self.counts, place, segments.counts)
        self.ids = _written(self.ids, segment, segments.ids)
        self.servers = _written(self.servers, segment, segments.servers)
        self.starts = _written(self.starts, segment, segments.starts)
        self.stops = _written(self.stops, segment, segments.stops)
        # Last, in one step: what an exception leaves in the columns before this is beyond all places, and is written
        # over when ``add`` is called again. Keys that were known before their columns could be read half made.
        self.places.update(dict(zip(keys, range(place, place + len(keys)), strict=True)))

    def __getitem__(self, key: Key) -> Entry:
        place = self.places[key]
        first = int(self.firsts[place])
        own = slice(first, first + int(self.counts[place]))
        columns = (column[own].tolist() for column in (self.ids, self.servers, self.starts, self.stops))
        segments = [
            Segment(number, server, key, start, stop) for number, server, start, stop in zip(*columns, strict=True)
        ]
        return Entry(self.specs[self.kinds[place]], segments, place)

    def __contains__(self, key: object) -> bool:
        return key in self.places

    def __iter__(self) -> Iterator[Key]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def bytes_by_server(self, servers: int) -> list[int]:
        """Return how many bytes of the arrays each of ``servers`` servers holds."""
        keys, segments = len(self.places), self.segments
        itemsizes = np.array([spec.itemsize for spec in self.specs], np.int64)[self.kinds[:keys]]
        held = np.zeros(servers, np.int64)
        nbytes = (self.stops - self.starts)[:segments] * np.repeat(itemsizes, self.counts[:keys])
        np.add.at(held, self.servers[:segments], nbytes)
        totals: list[int] = held.tolist()
        return totals


_NONE: Column = np.zeros(0, np.int64)


def _written(column: Column, start: int, values: Column) -> Column:
    """Return ``column`` with ``values`` from ``start`` on; it is another one, twice as long, if there is no room."""
    stop = start + len(values)
    if stop > len(column):
        # Twice as long: a program that passes its keys to init one by one would copy all columns for each of them.
        longer = np.zeros(max(stop, 2 * len(column)), np.int64)
        longer[:start] = column[:start]
        column = longer
    column[start:stop] = values
    return column


class PushClocks:
    """The clocks of one worker's keys in one store."""

    def __init__(self) -> None:
        self.pushed: Column = np.zeros(0, np.int64)  # how often each key has been pushed
        # the number of the last push that had it, of all pushes of the store; 0 for none
        self.last: Column = np.zeros(0, np.int64)
        self._versions: dict[int, int] = {}  # by segment: the round last read, where rounds may be ahead

    def grow(self, size: int) -> None:
        """Have room for so many keys; new ones have not been pushed."""
        self.pushed = _grown(self.pushed, size)
        self.last = _grown(self.last, size)

    def of(self, places: Column) -> list[int]:
        clocks: list[int] = self.pushed[places].tolist()
        return clocks

    def after(self, places: Column) -> list[int]:
        """Return how often the keys at ``places`` will have been pushed with the next push."""
        clocks: list[int] = (self.pushed[places] + 1).tolist()
        return clocks

    def note(self, places: Column, clocks: Column, push: int) -> None:
        """Set the clocks of the keys at ``places``, for push number ``push``. May be repeated."""
        self.pushed[places] = clocks
        self.last[places] = push

    def advance(self, segments: Sequence[Segment], entries: Sequence[Entry], versions: Sequence[int]) -> None:
        """Note the rounds of values that have come; a clock that is behind them moves up to them. May be repeated.

        Segments of one key may be at different rounds. The earliest counts: otherwise its round would wait for a push
        that this worker never makes.
        """
        for segment, entry, version in zip(segments, entries, versions, strict=True):
            self._versions[segment.id] = version
            known = [self._versions[other.id] for other in entry.segments if other.id in self._versions]
            if len(known) == len(entry.segments):
                self.pushed[entry.place] = max(int(self.pushed[entry.place]), min(known))

    def resume(self, entries: Sequence[Entry], rounds: Mapping[int, int], whole: bool = False) -> None:
        """After a join, move clocks up to ``rounds``, by segment, where these are ahead. May be repeated.

        Segments of one key may be at different rounds. With a quorum the earliest counts, see ``advance``. Where rounds
        are ``whole``, all have the same but for what a worker had made of them that died: then the latest counts.
        """
        for entry in entries:
            known = [rounds[segment.id] for segment in entry.segments if segment.id in rounds]
            reached = max(known, default=0) if whole else min(known, default=0)
            self.pushed[entry.place] = max(int(self.pushed[entry.place]), reached)


def _grown(column: Column, size: int) -> Column:
    if size <= len(column):
        return column
    grown = np.zeros(size, np.int64)
    grown[: len(column)] = column
    return grown
