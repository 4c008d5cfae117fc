"""What a list of keys means to servers: which messages it takes, and which elements of which arrays each has. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from kvstore.spec import Key, Spec


MOST_PIECES = 1 << 17  # in one message; what says which they are, or what their states are, must fit its header


class Piece(NamedTuple):
    """A segment: elements ``start`` to ``stop`` of the array of ``key``, which its server calls ``id``."""

    id: int
    server: int
    key: Key
    start: int
    stop: int


@dataclass(frozen=True)
class Entry:
    """What a worker knows of a key; ``place`` is its number among the store's keys, by which its clock is found."""

    spec: Spec
    pieces: list[Piece]
    place: int = 0

    @property
    def cut(self) -> bool:
        """Whether it is several segments."""
        return len(self.pieces) > 1

    @property
    def servers(self) -> int:
        """How many servers hold some of it; a server may hold several segments."""
        return len({piece.server for piece in self.pieces})


class Span(NamedTuple):
    """What has one payload: elements ``start`` to ``stop`` of an array, or of several whole ones, back to back."""

    keys: tuple[Key, ...]
    start: int
    stop: int
    pieces: int


class Stretch(NamedTuple):
    """Elements ``start`` to ``stop`` of the array at ``position`` of the list; ``whole`` if that is all of it."""

    position: int
    start: int
    stop: int
    whole: bool


@dataclass
class Parcel:
    """What one message carries: pieces of one dtype on one server, back to back; merged, they are stretches."""

    server: int
    dtype: str
    pieces: list[Piece] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)  # one for each piece
    stretches: list[Stretch] = field(default_factory=list)
    nbytes: int = 0
    small: int = 0  # whole arrays of at most so many elements share payloads

    def __post_init__(self) -> None:
        self.ids: list[int] = []
        self.sizes: list[int] = []
        self.positions: list[int] = []  # of the arrays that pieces are of, in the list

    @cached_property
    def places(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Of the keys of its pieces, among those of the store."""
        return np.fromiter((entry.place for entry in self.entries), np.int64, len(self.entries))

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return sum(stretch.stop - stretch.start for stretch in self.stretches)

    def add(self, position: int, piece: Piece, entry: Entry) -> None:
        """Put a piece in."""
        self.pieces.append(piece)
        self.entries.append(entry)
        self.ids.append(piece.id)
        self.sizes.append(piece.stop - piece.start)
        self.positions.append(position)
        self.nbytes += (piece.stop - piece.start) * entry.spec.itemsize
        start = piece.start
        if self.stretches and self.stretches[-1].position == position and self.stretches[-1].stop == start:
            start = self.stretches.pop().start
        self.stretches.append(Stretch(position, start, piece.stop, piece.stop - start == entry.spec.size))

    def is_small(self, entry: Entry) -> bool:
        """Whether an array shares payloads."""
        return bool(self.small) and not entry.cut and entry.spec.size <= self.small

    @cached_property
    def spans(self) -> list[Span]:
        """What the payloads of all pieces are of, in order."""
        made: list[Span] = []
        shared = False
        for key, start, stop, small, pieces in self._runs():
            if small and shared:
                last = made.pop()
                made.append(Span((*last.keys, key), 0, last.stop + stop, last.pieces + pieces))
            else:
                made.append(Span((key,), start, stop, pieces))
            shared = small
        return made

    def _runs(self) -> Iterator[tuple[Key, int, int, bool, int]]:
        """Yield the key, start and stop of each stretch, whether its array is small, and how many pieces it is."""
        at = 0
        for _, start, stop, _ in self.stretches:
            first = self.pieces[at]
            small = self.is_small(self.entries[at])
            count = 1
            while self.pieces[at + count - 1].stop < stop:
                count += 1
            yield first.key, start, stop, small, count
            at += count


def parcels(entries: Mapping[Key, Entry], keys: Sequence[Key], most: int, small: int = 0) -> list[Parcel]:
    """Return the messages that ``keys`` take: each of at most ``most`` bytes or a single piece, servers in turns.

    None has more than ``MOST_PIECES``. In each, whole arrays of at most ``small`` elements come first, so that they can share a payload.
    """
    by_server: dict[int, list[Parcel]] = {}
    latest: dict[tuple[int, str], Parcel] = {}
    for position, key in enumerate(keys):
        entry = entries[key]
        for piece in entry.pieces:
            where = piece.server, entry.spec.dtype
            parcel = latest.get(where)
            nbytes = (piece.stop - piece.start) * entry.spec.itemsize
            full = parcel is not None and len(parcel.ids) >= MOST_PIECES
            if parcel is None or full or (parcel.nbytes and parcel.nbytes + nbytes > most):
                parcel = latest[where] = Parcel(*where, small=small)
                by_server.setdefault(piece.server, []).append(parcel)
            parcel.add(position, piece, entry)
    turns = itertools.zip_longest(*(by_server[server] for server in sorted(by_server)))
    made = [parcel for turn in turns for parcel in turn if parcel is not None]
    return [_small_first(parcel) for parcel in made] if small else made


def _small_first(parcel: Parcel) -> Parcel:
    made = Parcel(parcel.server, parcel.dtype, small=parcel.small)
    for wanted in (True, False):
        for position, piece, entry in zip(parcel.positions, parcel.pieces, parcel.entries, strict=True):
            if parcel.is_small(entry) is wanted:
                made.add(position, piece, entry)
    return made
