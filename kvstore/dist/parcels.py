"""What a list of keys means to servers: which messages it takes, and which elements of which arrays each has. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

from kvstore.spec import Key, Spec


class Piece(NamedTuple):
    """A segment: elements ``start`` to ``stop`` of the array of ``key``, which its server calls ``id``."""

    id: int
    server: int
    key: Key
    start: int
    stop: int


class Receipt(Protocol):
    """Of a push: see ``Ticket``."""

    @property
    def open(self) -> Collection[int]:
        """The requests that have not been answered."""
        ...


@dataclass
class Entry:
    """What a worker knows of a key: ``clock`` is how often it has pushed it, ``pushed`` the last push's receipt."""

    spec: Spec
    pieces: list[Piece]
    clock: int = 0
    pushed: Receipt | None = None
    versions: dict[int, int] = field(default_factory=dict)  # by piece, of the values that were last read

    @property
    def cut(self) -> bool:
        """Whether it is several segments."""
        return len(self.pieces) > 1

    @property
    def on_way(self) -> bool:
        """Whether the last push has not taken effect yet."""
        return self.pushed is not None and bool(self.pushed.open)

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

    @property
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

    def advance(self, versions: Sequence[int]) -> None:
        """Note the rounds of values that have come: who is behind them goes on from there.

        Pieces of one key may be at different rounds; the earliest counts, or a round might wait for this worker.
        """
        for piece, entry, version in zip(self.pieces, self.entries, versions, strict=True):
            entry.versions[piece.id] = version
            if len(entry.versions) == len(entry.pieces):
                entry.clock = max(entry.clock, min(entry.versions.values()))

    def clocks(self) -> list[int]:
        """How often each piece has been pushed."""
        return [entry.clock for entry in self.entries]


def parcels(entries: Mapping[Key, Entry], keys: Sequence[Key], most: int, small: int = 0) -> list[Parcel]:
    """Return the messages that ``keys`` take: each of at most ``most`` bytes or a single piece, servers in turns.

    In each, whole arrays of at most ``small`` elements come first, so that they can share a payload.
    """
    by_server: dict[int, list[Parcel]] = {}
    latest: dict[tuple[int, str], Parcel] = {}
    for position, key in enumerate(keys):
        entry = entries[key]
        for piece in entry.pieces:
            where = piece.server, entry.spec.dtype
            parcel = latest.get(where)
            nbytes = (piece.stop - piece.start) * entry.spec.itemsize
            if parcel is None or (parcel.nbytes and parcel.nbytes + nbytes > most):
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
