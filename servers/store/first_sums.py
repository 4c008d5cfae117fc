"""The first sums of a store, for workers that are started again. No I/O.

A program makes some sums before it trains: it compares settings, or shares out its data. A worker that comes back later
makes them once more, alone, and gets what the others have had.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.values import to_buffer
from servers.store.bucket import Bucket

MOST_ROUNDS = 16  # of each segment
MOST_BYTES = 64 << 10  # of a segment; what is larger is a gradient
MOST_IN_ALL = 16 << 20


class FirstSums:
    """The results of the first rounds of small arrays, in a store without an optimizer."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int], bytes] = {}  # by segment and round
        self._left = MOST_IN_ALL

    def note(self, bucket: Bucket) -> None:
        """Keep the result of the round of ``bucket`` that has just been closed."""
        version = bucket.rounds.version
        if version > MOST_ROUNDS:
            return
        for number, start, size in zip(bucket.ids, bucket.starts, bucket.sizes, strict=True):
            nbytes = size * bucket.value.itemsize
            if nbytes <= min(MOST_BYTES, self._left):
                self._left -= nbytes
                self._sums[number, version] = bytes(to_buffer(bucket.value[start : start + size]))

    def find(self, ids: Sequence[int], clocks: Sequence[int]) -> list[bytes] | None:
        """Return the sum of each segment's round; None if one of them is not kept."""
        found = [self._sums.get(which) for which in zip(ids, clocks, strict=True)]
        return None if None in found else [each for each in found if each is not None]
