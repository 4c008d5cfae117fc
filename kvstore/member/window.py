"""The send window of one server: a bounded number of bytes is in flight, and the most urgent request goes next. Pure.

Answers to requests that are all sent at once come in the order of the requests, however urgent some are. With a bound,
requests that have not been sent yet can still be overtaken (P3, Jayarajan et al. 2019; ByteScheduler, Peng et al.
2019).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class WindowSize(NamedTuple):
    """How many bytes of answers may be in flight, and how many until the first answer comes."""

    most: int
    first: int


class Window(Generic[T]):
    """Requests to one server. A request for more than the window goes when nothing else is in flight."""

    def __init__(self, size: WindowSize) -> None:
        self._size = size
        self._room = size.first  # how many bytes may be in flight now
        self._in_flight: dict[int, int] = {}  # number of the request -> bytes of its answer
        self._total = 0  # of these
        self._order = itertools.count()
        self._waiting: list[tuple[int, int, int, int, T]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, number: int, nbytes: int, priority: int, item: T) -> None:
        """Let request ``number`` wait for its turn: by priority, then in order."""
        if not self._in_flight and not self._waiting:
            self._room = self._size.first
        heapq.heappush(self._waiting, (-priority, next(self._order), number, nbytes, item))

    def begin(self, number: int, nbytes: int) -> None:
        """Count request ``number`` as sent."""
        self._in_flight[number] = nbytes
        self._total += nbytes

    def answered(self, number: int) -> None:
        """Count request ``number`` as in flight no more: it has been answered, or will not be."""
        if number in self._in_flight:
            self._total -= self._in_flight.pop(number)
            self._room = self._size.most

    def ready(self) -> list[T]:
        """Return the requests whose turn it is. They count as sent."""
        chosen: list[T] = []
        while self._waiting and (not self._in_flight or self._total + self._waiting[0][3] <= self._room):
            _, _, number, nbytes, item = heapq.heappop(self._waiting)
            self.begin(number, nbytes)
            chosen.append(item)
        return chosen

    def urgent(self, wanted: Callable[[T], bool]) -> list[T]:
        """Return the ``wanted`` requests, whether or not it is their turn. They count as sent."""
        chosen = sorted((entry for entry in self._waiting if wanted(entry[4])), key=lambda entry: entry[:2])
        if not chosen:
            return []
        numbers = {entry[2] for entry in chosen}
        self._waiting = [entry for entry in self._waiting if entry[2] not in numbers]
        heapq.heapify(self._waiting)
        for _, _, number, nbytes, _ in chosen:
            self.begin(number, nbytes)
        return [entry[4] for entry in chosen]
