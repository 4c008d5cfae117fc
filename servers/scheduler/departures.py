"""Workers that have left in order, and which of them the others know of. Pure: the clock is passed in.

Those who wait for a worker that has left are told after its farewell, not at once: a process that leaves because it is
about to fail needs that long to end, and its exit code says more than that it has left.
"""

from __future__ import annotations

from collections import deque


class Departures:
    """The workers of one job that have left.

    Args:
        farewell_s: how long after a worker has left the others are told.

    Attributes:
        left: who has left.
        known: those of them that the others know of.
    """

    def __init__(self, farewell_s: float) -> None:
        self.left: set[int] = set()
        self.known: set[int] = set()
        self._farewell_s = farewell_s
        self._recent: deque[tuple[float, int]] = deque()  # when, and who, of those that are not known of

    def add(self, rank: int, now: float) -> None:
        """Note that a worker leaves. ``now`` never goes back from one call to the next."""
        self.left.add(rank)
        self._recent.append((now, rank))

    def due(self, now: float, *, all_gone: bool) -> list[int]:
        """Return the workers that the others are to know of from now on; all of them if nobody is left to wait."""
        ranks: list[int] = []
        while self._recent and (all_gone or now - self._recent[0][0] >= self._farewell_s):
            ranks.append(self._recent.popleft()[1])
        self.known.update(ranks)
        return ranks
