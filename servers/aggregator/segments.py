"""What workers have told of a store's segments, and the lists of them that they push. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvstore import wire
from kvstore.errors import KeyNotInitialized, Mismatch, UsageError
from kvstore.spec import ITEMSIZE, Key, sum_dtype
from kvstore.values.addresses import Column

MOST_LISTS = 4096  # that are kept


class KnownSegment(NamedTuple):
    """A segment: of which key, on which server, how many elements of which dtype."""

    key: Key
    server: int
    size: int
    dtype: str


class SegmentList:
    """Segments on one server, of one dtype, which one message carries.

    Args:
        ids: of the segments, in order.
        places: of the segments among all of the store.
        segments: what is known of them.

    Attributes:
        ids, places, segments: see above.
        server, dtype: of all segments.
        sizes, size, nbytes: elements of each, elements and bytes of all.
        sum_dtype, sum_bytes: of the sum of several pushes.
        others: other lists that have some of the segments, too.

    Raises:
        UsageError: they are not all of one server and one dtype.
    """

    def __init__(self, ids: tuple[int, ...], places: Column, segments: Sequence[KnownSegment]) -> None:
        if len({(segment.server, segment.dtype) for segment in segments}) != 1:
            raise UsageError("expected segments of one server and one dtype in a message")
        self.ids = ids
        self.places = places
        self.segments = segments
        self.server, self.dtype = segments[0].server, segments[0].dtype
        self.sizes = [segment.size for segment in segments]
        self.size = sum(self.sizes)
        self.nbytes = self.size * ITEMSIZE[self.dtype]
        self.sum_dtype = sum_dtype(self.dtype)
        self.sum_bytes = self.size * ITEMSIZE[self.sum_dtype]
        self.others: set[SegmentList] = set()

    @property
    def keys(self) -> dict[Key, None]:
        """The keys of the segments, each once, in order."""
        return dict.fromkeys(segment.key for segment in self.segments)


class HostSegments:
    """The segments of one store, as the workers of this host know them."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}  # by id
        self._segments: list[KnownSegment] = []
        self._lists: dict[tuple[int, ...], SegmentList] = {}
        self._with: dict[int, set[SegmentList]] = {}  # by id: the lists that it is in

    def __len__(self) -> int:
        return len(self._segments)

    def add(self, message: wire.Describe) -> None:
        """Take what a worker tells. Other workers tell the same.

        Raises:
            Mismatch: another worker has told otherwise; nothing has changed.
        """
        new: dict[int, KnownSegment] = {}
        at = 0
        for key, kind, count in zip(message.keys, message.kinds, message.counts, strict=True):
            for number in range(at, at + count):
                segment = KnownSegment(key, message.servers[number], message.sizes[number], message.dtypes[kind])
                place = self._places.get(message.ids[number])
                if place is None:
                    new[message.ids[number]] = segment
                elif self._segments[place] != segment:
                    raise Mismatch(f"{message.node} and another worker of this host describe {key!r} differently")
            at += count
        self._places |= {number: place for place, number in enumerate(new, len(self._segments))}
        self._segments += new.values()

    def places(self, ids: Sequence[int]) -> Column:
        """Return the places of segments among all of the store.

        Raises:
            KeyNotInitialized: nobody has described one of them.
        """
        try:
            return np.fromiter(map(self._places.__getitem__, ids), np.int64, len(ids))
        except KeyError as exc:
            raise KeyNotInitialized(f"segment {exc.args[0]} is not known to this aggregator; call init first") from None

    def key(self, number: int) -> Key:
        """Return the key of segment ``number``; see ``places`` for errors."""
        return self._segments[int(self.places([number])[0])].key

    def size(self, number: int) -> int:
        """Return how many elements segment ``number`` has; see ``places`` for errors."""
        return self._segments[int(self.places([number])[0])].size

    def listed(self, ids: Sequence[int]) -> SegmentList:
        """Return the list of segments ``ids``, always the same object.

        Raises:
            KeyNotInitialized: nobody has described one of them.
            UsageError: they are none, or of several servers or dtypes.
        """
        wanted = tuple(ids)
        known = self._lists.get(wanted)
        if known is not None:
            return known
        places = self.places(wanted)
        made = SegmentList(wanted, places, list(map(self._segments.__getitem__, places.tolist())))
        for number in wanted:
            beside = self._with.setdefault(number, set())
            made.others |= beside
            beside.add(made)
        for other in made.others:
            other.others.add(made)
        self._lists[wanted] = made
        return made

    def forget(self, busy: set[SegmentList]) -> None:
        """Forget lists that are not ``busy``, if there are very many."""
        if len(self._lists) <= MOST_LISTS:
            return
        for ids in [ids for ids, listed in self._lists.items() if listed not in busy]:
            gone = self._lists.pop(ids)
            for number in ids:
                self._with[number].discard(gone)
            for other in gone.others:
                other.others.discard(gone)
