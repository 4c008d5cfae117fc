"""Numbers for what rows of a trace name: labels, peers and nodes."""

from __future__ import annotations

import itertools
from typing import Any


class Words(dict[Any, int]):
    """The number of each value that has been asked for since the last call of ``take``; no number is used twice."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def __missing__(self, value: Any) -> int:
        """Give ``value`` a number."""
        number = self[value] = next(self._numbers)
        return number

    def take(self) -> list[tuple[int, Any]]:
        """Return the numbers, and what they stand for, and forget them."""
        taken = [(number, value) for value, number in self.items()]
        self.clear()
        return taken
