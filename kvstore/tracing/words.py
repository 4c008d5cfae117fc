"""Numbers for what rows of a trace name: labels, peers and nodes. Any thread may ask for them."""

from __future__ import annotations

import itertools
from typing import Any


class Words(dict[Any, int]):
    """The number of each value that has been asked for since the last call of ``take``.

    A value that is asked for again later may get another number; no number is used twice.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._new: list[tuple[int, Any]] = []
        self._before: list[tuple[int, Any]] = []

    def __missing__(self, value: Any) -> int:
        """Give ``value`` a number. If two threads do so at once, it has two, which both stand for it."""
        number = next(self._numbers)
        self[value] = number
        self._new.append((number, value))
        return number

    def take(self) -> list[tuple[int, Any]]:
        """Return what the numbers stand for that have been asked for since the call before the last one.

        Call ``clear`` first, then take the rows that use them, then call this. A thread that has a number has perhaps
        not written its row yet: the row comes with the next ones, and so does the number once more.
        """
        count = len(self._new)
        new = self._new[:count]
        del self._new[:count]
        both, self._before = self._before + new, new
        return both
