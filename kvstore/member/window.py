"""Whose turn it is: a bounded number of bytes on the way from each server, and the highest priority next. Pure.

What is asked for all at once comes in the order of asking, however urgent some of it is. With a bound, what is not yet
on its way can still be overtaken (P3, Jayarajan et al. 2019; ByteScheduler, Peng et al. 2019).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Lane(Generic[T]):
    """Requests to one server.

    Args:
        window: bytes of answers that may be on their way; a request for more goes when nothing else is.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._on_way: dict[int, int] = {}  # number of the request -> bytes of its answer
        self._bytes = 0
        self._order = itertools.count()
        self._waiting: list[tuple[int, int, int, int, T]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, number: int, nbytes: int, priority: int, item: T) -> None:
        """Let request ``number`` wait for its turn: after those of higher priority, and of the same and before it."""
        heapq.heappush(self._waiting, (-priority, next(self._order), number, nbytes, item))

    def answered(self, number: int) -> None:
        """Note that the answer to request ``number`` is here, or will not come."""
        self._bytes -= self._on_way.pop(number, 0)

    def ready(self) -> list[T]:
        """Return those whose turn it is; they count as on their way."""
        found: list[T] = []
        while self._waiting and (not self._on_way or self._bytes + self._waiting[0][3] <= self._window):
            _, _, number, nbytes, item = heapq.heappop(self._waiting)
            found.append(self._send(number, nbytes, item))
        return found

    def urgent(self, wanted: Callable[[T], bool]) -> list[T]:
        """Return the ``wanted`` ones, whether or not it is their turn; they count as on their way."""
        chosen = sorted(entry[:4] for entry in self._waiting if wanted(entry[4]))
        if not chosen:
            return []
        items = {entry[2]: entry[4] for entry in self._waiting}
        numbers = {number for _, _, number, _ in chosen}
        self._waiting = [entry for entry in self._waiting if entry[2] not in numbers]
        heapq.heapify(self._waiting)
        return [self._send(number, nbytes, items[number]) for _, _, number, nbytes in chosen]

    def _send(self, number: int, nbytes: int, item: T) -> T:
        self._on_way[number] = nbytes
        self._bytes += nbytes
        return item
