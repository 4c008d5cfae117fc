"""How long rounds that have their quorum wait for the workers that are late. Pure; takes the time.

A round waits for each worker as long as that one takes when it is late: the median of its last times, and three times
their spread, or a tenth of what the store allows if that is more. It waits for no longer than the store allows, and not
at all for a worker that usually takes longer: that would cost all others the time, and bring nothing.

Each server looks at its own clock, and each has the pushes of all workers. So servers agree on who is in a round as far
as pushes reach them at the same time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from statistics import median
from weakref import WeakKeyDictionary

from servers.store.target import AnyTarget

RECENT = 9  # times of a worker, and rounds of a target, that are remembered
FEW = 3  # times that say too little
SPREADS = 3
LEAST = 0.1


class Grace:
    """The waits of one store's rounds, for at most ``most_s`` seconds each.

    Attributes:
        due: when a round has waited for long enough; None if none waits.
    """

    def __init__(self, most_s: float) -> None:
        self.due: float | None = None
        self._most_s = most_s
        # By rank, of the rounds that had their quorum before its push: how long after it that came; inf: not yet.
        self._took: dict[int, deque[float]] = {}
        self._quorums: WeakKeyDictionary[AnyTarget, dict[int, float]] = WeakKeyDictionary()  # by round: since when

    def came(self, target: AnyTarget, ranks: Collection[int], clock: int, now: float) -> None:
        """Note that the pushes ``clock`` of ``ranks`` to ``target`` come now."""
        since = self._quorums.get(target, {}).get(clock)
        for rank in ranks:
            took = self._took.setdefault(rank, deque(maxlen=RECENT))
            late = clock <= target.rounds.version  # that round has been closed without it
            if math.inf in took and (late or since is None):
                took.remove(math.inf)  # it is there again, in time or not
            if since is not None:
                took.append(now - since)

    def over(self, target: AnyTarget, now: float) -> bool:
        """Return whether the next round of ``target`` may be closed, as far as those are concerned that it lacks."""
        awaited = target.rounds.awaited()
        if awaited is None:
            return False
        number, quorums = target.rounds.version + 1, self._quorums.setdefault(target, {})
        until = quorums.setdefault(number, now) + self.seconds(awaited)
        if now < until:
            self.due = until if self.due is None else min(self.due, until)
            return False
        quorums.pop(number - RECENT, None)
        for rank in awaited:
            self._took.setdefault(rank, deque(maxlen=RECENT)).append(math.inf)
        return True

    def seconds(self, ranks: Collection[int]) -> float:
        """Return how long a round waits for ``ranks`` from its quorum on."""
        return max(map(self._seconds, ranks), default=0.0)

    def _seconds(self, rank: int) -> float:
        took = self._took.get(rank, ())
        if len(took) < FEW:
            return self._most_s
        usual = median(took)
        if usual > self._most_s:
            return 0.0
        spread = median(abs(each - usual) for each in took)
        return min(self._most_s, usual + max(SPREADS * spread, LEAST * self._most_s))
