"""Which workers are inside ``join`` of one store. Pure.

Servers decide when ``join`` returns. The scheduler must know, because a worker inside it comes to no barrier and
gives no key its first value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection


class Joins:
    """How often each worker has called ``join``.

    Args:
        workers: the ranks of all workers.
        gone: those of them that have left.

    Attributes:
        inside: the ranks that wait for others which have called it less often, and have not left.
    """

    def __init__(self, workers: Collection[int], gone: Collection[int] = ()) -> None:
        self.inside: set[int] = set()
        self._calls = {rank: 0 for rank in workers if rank not in gone}
        self._counts = Counter(self._calls.values())  # how many workers have called it so often; no zeros
        self._least = 0  # the smallest number of calls of any worker

    def arrive(self, rank: int, number: int) -> bool:
        """Note a worker's ``number``-th call, before servers learn of it; return whether it is inside."""
        before = self._calls.get(rank)
        if before is not None and number > before:
            self._calls[rank] = number
            self._counts[number] += 1
            self.inside.add(rank)
            self._uncount(before)
        return rank in self.inside

    def depart(self, rank: int) -> None:
        """Note that a worker has left: nobody waits for it any more."""
        before = self._calls.pop(rank, None)
        if before is not None:
            self.inside.discard(rank)
            self._uncount(before)

    def _uncount(self, calls: int) -> None:
        """Count one worker less at ``calls``; let those out who wait for nobody any more."""
        self._counts[calls] -= 1
        if self._counts[calls]:
            return
        del self._counts[calls]
        if calls == self._least and self._counts:
            self._least = min(self._counts)
            self.inside = {rank for rank in self.inside if self._calls[rank] > self._least}
