"""When a standby is handed what updates have made, so that it need not make them. Pure.

A standby that reads this server's memory is handed the values and states of arrays every few rounds. That costs a copy
of the states, and the values cost nothing. Until then it keeps the sums of the rounds, with which it could make their
updates if it had to take over.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from servers.store.bucket import Bucket

ROUNDS = 4  # whose sums are kept at most: with more the copy of the states costs hardly less
LEAST_BYTES = 64 << 10  # of the sums of a round: less is updated in no time, and may not go by reference
MOST_BYTES = 256 << 20  # of all sums of a store that are kept


def interval(random: bool, shares: bool, round_bytes: int, store_bytes: int) -> int:
    """Return after how many rounds of arrays a standby is handed them; 0 if it makes their updates itself.

    Args:
        random: whether nobody else could make the same updates.
        shares: whether the standby reads this server's memory.
        round_bytes: of the sums of the arrays.
        store_bytes: of the sums of all arrays of their store.
    """
    if random:
        return 1
    rounds = min(ROUNDS, MOST_BYTES // max(1, store_bytes))
    return rounds if shares and rounds > 1 and round_bytes >= LEAST_BYTES else 0


class HandOver:
    """Counts the rounds of a store's buckets since the standby was last handed what they have made."""

    def __init__(self) -> None:
        self._rounds: WeakKeyDictionary[Bucket, int] = WeakKeyDictionary()
        self._failed = False

    def keeps(self, buckets: Sequence[Bucket], every: int) -> bool:
        """Note a round of ``buckets``; return whether the standby may keep its sums until it is handed the buckets.

        Args:
            buckets: those that are updated.
            every: see ``interval``.
        """
        # A standby learns that an update has failed by making it. So it makes all that it has kept with the next round.
        if not every or self._failed:
            self._failed = False
            return False
        for bucket in buckets:
            self._rounds[bucket] = self._rounds.get(bucket, 0) + 1
        return True

    def due(self, buckets: Sequence[Bucket], every: int) -> bool:
        """Return whether the standby is to be handed ``buckets`` now, after their update."""
        if not every or max(self._rounds.get(bucket, 0) for bucket in buckets) < every:
            return False
        for bucket in buckets:
            self._rounds[bucket] = 0
        return True

    def fail(self) -> None:
        """Note that the update of a round has failed."""
        self._failed = True
