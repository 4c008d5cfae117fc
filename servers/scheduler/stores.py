"""Which number each store has. Pure.

The n-th stores of all workers are one store, whenever each makes its own. Messages have room for few numbers, so one
that all workers have closed is given again.
"""

from __future__ import annotations

from collections.abc import Collection

from kvstore.errors import UsageError
from kvstore.wire import MAX_STORES


class Stores:
    """The stores of one job.

    Args:
        workers: the ranks of those who make them.
    """

    def __init__(self, workers: Collection[int]) -> None:
        self._workers = frozenset(workers)
        self._numbers: dict[int, int] = {}  # by ordinal
        self._closed: dict[int, set[int]] = {}  # by number: who has closed it

    def open(self, ordinal: int) -> int:
        """Return the number of everybody's ``ordinal``-th store.

        Raises:
            UsageError: no number is left.
        """
        number = self._numbers.get(ordinal)
        if number is None:
            free = set(range(MAX_STORES)) - set(self._numbers.values())
            if not free:
                raise UsageError(
                    f"this job has {MAX_STORES} dist stores, which is the most there can be at once; "
                    "close() those that are not needed any more, on all workers"
                )
            number = self._numbers[ordinal] = min(free)
            self._closed[number] = set()
        return number

    def close(self, rank: int, number: int) -> bool:
        """Note that ``rank`` does not use store ``number`` any more; return whether nobody does now."""
        closed = self._closed.get(number)
        if closed is None:
            return False
        closed.add(rank)
        if closed < self._workers:
            return False
        del self._closed[number]
        self._numbers = {ordinal: other for ordinal, other in self._numbers.items() if other != number}
        return True
