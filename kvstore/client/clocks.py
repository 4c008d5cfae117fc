"""How often a worker has pushed each of its keys: a number for each key, by its place in the store. Pure.

They are numpy columns: a push of thousands of keys changes two arrays, each in one step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from kvstore.client.plans.entries import Entry, Segment
from kvstore.values.addresses import Column


class Carried(Protocol):
    """The segments of one message: of arrays (``Parcel``), or of tables (``RowParcel``)."""

    @property
    def places(self) -> Column:
        """Of the segments' keys, among those of the store."""
        ...

    @property
    def segments(self) -> list[Segment]:
        """See ``Segment``."""
        ...

    @property
    def entries(self) -> list[Entry]:
        """What is known of the key of each segment."""
        ...


class PushClocks:
    """The clocks of one worker's keys in one store.

    Attributes:
        pushed: how often each key has been pushed.
        last: the number of the last push that had it, of all pushes of the store; 0 for none.
    """

    def __init__(self) -> None:
        self.pushed: Column = np.zeros(0, np.int64)
        self.last: Column = np.zeros(0, np.int64)
        self._versions: dict[int, int] = {}  # by segment: the round last read, where rounds may be ahead

    def grow(self, size: int) -> None:
        """Have room for so many keys; new ones have not been pushed."""
        self.pushed = _grown(self.pushed, size)
        self.last = _grown(self.last, size)

    def of(self, parcel: Carried) -> list[int]:
        """Return how often the key of each segment of ``parcel`` has been pushed."""
        clocks: list[int] = self.pushed[parcel.places].tolist()
        return clocks

    def after(self, parcel: Carried) -> list[int]:
        """Return how often the key of each segment will have been pushed with the next push."""
        clocks: list[int] = (self.pushed[parcel.places] + 1).tolist()
        return clocks

    def note(self, places: Column, clocks: Column, push: int) -> None:
        """Set the clocks of the keys at ``places``, for push number ``push``. May be repeated."""
        self.pushed[places] = clocks
        self.last[places] = push

    def advance(self, parcel: Carried, versions: Sequence[int]) -> None:
        """Note the rounds of values that have come; a clock that is behind them moves up to them. May be repeated.

        Segments of one key may be at different rounds. The earliest counts: otherwise its round would wait for a push
        that this worker never makes.
        """
        for segment, entry, version in zip(parcel.segments, parcel.entries, versions, strict=True):
            self._versions[segment.id] = version
            known = [self._versions[other.id] for other in entry.segments if other.id in self._versions]
            if len(known) == len(entry.segments):
                self.pushed[entry.place] = max(int(self.pushed[entry.place]), min(known))

    def resume(self, entries: Sequence[Entry], rounds: Mapping[int, int]) -> None:
        """After a join, move clocks up to ``rounds``, by segment, where these are ahead. May be repeated."""
        for entry in entries:
            known = [rounds[segment.id] for segment in entry.segments if segment.id in rounds]
            self.pushed[entry.place] = max(int(self.pushed[entry.place]), min(known, default=0))


def _grown(column: Column, size: int) -> Column:
    if size <= len(column):
        return column
    grown = np.zeros(size, np.int64)
    grown[: len(column)] = column
    return grown
