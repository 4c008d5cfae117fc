"""By how much this process's clock and the scheduler's differ, from beats and their echoes. Pure.

A beat is sent at one time of this process and its echo received at another; in between the scheduler has read its own
clock. Taking the middle is wrong by at most half the round trip, however long each way took (as in NTP, RFC 5905). Of
the last round trips the shortest says it best. A scheduler that was started again may have another clock, so each start
has an offset of its own.
"""

from __future__ import annotations

from collections import deque

KEPT = 8  # round trips that are remembered of one start of the scheduler
MOST_STARTS = 16


class ClockOffsets:
    """The offsets of one process's clock to those of the scheduler's processes."""

    def __init__(self) -> None:
        self._trips: dict[int, deque[tuple[float, float]]] = {}  # by start: half a round trip, and the offset

    @property
    def settled(self) -> bool:
        """Whether the scheduler that was heard last has echoed so often that more echoes will say little more."""
        return bool(self._trips) and len(next(reversed(self._trips.values()))) >= KEPT

    def take(self, start: int, sent: float, received: float, now: float) -> None:
        """Take an echo.

        Args:
            start: of the scheduler.
            sent, received: when the beat left and the echo came, by this process's clock.
            now: when the scheduler answered, by its own.
        """
        if received < sent:
            return
        trips = self._trips.get(start)
        if trips is None:
            trips = self._trips[start] = deque(maxlen=KEPT)
            while len(self._trips) > MOST_STARTS:
                del self._trips[next(iter(self._trips))]
        trips.append(((received - sent) / 2, now - (sent + received) / 2))

    @property
    def known(self) -> list[list[float]]:
        """For each start: its number, the offset in seconds, and by how much that may be wrong; see ``TraceChunk``."""
        best = ((start, min(trips)) for start, trips in self._trips.items())
        return [[start, offset, error] for start, (error, offset) in best]
