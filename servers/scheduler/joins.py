"""Who is inside ``join`` of one store. Pure.

Servers let workers out of it; here it is known that whoever is inside comes to no barrier and gives no first values.
"""

from __future__ import annotations

from collections.abc import Collection


class Joins:
    """How often each worker has called ``join``."""

    def __init__(self, workers: Collection[int]) -> None:
        self._calls = dict.fromkeys(workers, 0)

    def arrive(self, rank: int, number: int) -> None:
        """Note the call ``number`` of a worker, which knows this before the servers know of the call."""
        self._calls[rank] = max(self._calls[rank], number)

    def inside(self, departed: Collection[int]) -> frozenset[int]:
        """Return those who wait for others that have not called it as often, and have not left."""
        there = {rank: calls for rank, calls in self._calls.items() if rank not in departed}
        least = min(there.values(), default=0)
        return frozenset(rank for rank, calls in there.items() if calls > least)
