"""Fair shares of a network line: a connection may not send much faster than the fastest one did lately. Pure.

Linux lets a connection queue at the network card what it would send within a millisecond, by an estimate that grows
with its window. Where nothing gets lost, windows only grow, some sooner than others, and their shares of the line grow
with them. But a round takes as long as the slowest connection. A limit on all estimates makes the shares equal again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T", bound=Hashable)

LOOK_S = 0.25  # between two looks
TIMES = 3  # the limit, of what was reached: high enough for a line that has become free to be filled again soon
LEAST = 1 << 20  # bytes in each ``LOOK_S``; a slower connection waits for something else than the line
BUSY = 0.8  # of the time between two looks
FAST = 500_000_000  # bytes a second; beyond, keeping to a rate costs more processor time than it is good for
UNLIMITED = 2**64 - 1


class LinkProgress(NamedTuple):
    """A connection, as it is at a look."""

    acked: int  # bytes that the other side has confirmed so far
    busy: float  # seconds so far in which there was something on its way, and the other side had room for more
    more: bool  # whether there is something that has not left yet


class Pacing(Generic[T]):
    """The limit of one process's connections to other hosts; ``T`` is what they are known by."""

    def __init__(self) -> None:
        self._before: dict[T, LinkProgress] = {}
        self._at = 0.0
        self._limited = False

    def look(self, seen: Mapping[T, LinkProgress], now: float) -> int | None:
        """Return how many bytes a second each connection may send from now on; None leaves that as it is.

        Only connections count that have waited for the line, or for those who share it, since the last look.

        Args:
            seen: all connections.
            now: seconds.
        """
        elapsed = now - self._at
        least, least_s = LEAST * max(1.0, elapsed / LOOK_S), BUSY * elapsed
        rates = [
            (after.acked - before.acked) / (after.busy - before.busy)
            for connection, after in seen.items()
            if (before := self._before.get(connection)) is not None
            and before.more
            and after.more
            and after.acked - before.acked >= least
            and after.busy - before.busy >= least_s > 0
        ]
        self._before, self._at = dict(seen), now
        if not rates:
            return None
        limit = TIMES * max(rates)
        if limit < FAST:
            self._limited = True
            return int(limit)
        lifted, self._limited = self._limited, False
        return UNLIMITED if lifted else None
