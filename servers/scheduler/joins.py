"""Who is inside ``join`` of one store. Pure.

Servers let workers out of it; here it is known that whoever is inside comes to no barrier and gives no first values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection


class Joins:
    """How often each worker has called ``join``.

    Args:
        workers: the ranks of those who call it.
        gone: those of them that have left.

    Attributes:
        inside: who waits for others that have not called it as often, and have not left.
    """

    def __init__(self, workers: Collection[int], gone: Collection[int] = ()) -> None:
        self.inside: set[int] = set()
        self._calls = {rank: 0 for rank in workers if rank not in gone}
        self._counts = Counter(self._calls.values())  # of workers, by how often they have called; no zeros
        self._least = 0  # calls of whoever has called least often

    def arrive(self, rank: int, number: int) -> bool:
        """Note the call ``number`` of a worker, which is told here before servers are; return whether it is inside."""
        before = self._calls.get(rank)
        if before is not None and number > before:
            self._calls[rank] = number
            self._counts[number] += 1
            self.inside.add(rank)
            self._uncount(before)
        return rank in self.inside

    def depart(self, rank: int) -> None:
        """Nobody waits any more for a worker that has left."""
        before = self._calls.pop(rank, None)
        if before is not None:
            self.inside.discard(rank)
            self._uncount(before)

    def _uncount(self, calls: int) -> None:
        """Count one worker less that has called so often; let those out whom nobody is behind any more."""
        self._counts[calls] -= 1
        if self._counts[calls]:
            return
        del self._counts[calls]
        if calls == self._least and self._counts:
            self._least = min(self._counts)
            self.inside = {rank for rank in self.inside if self._calls[rank] > self._least}
