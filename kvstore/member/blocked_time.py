"""How long the callers of a process have waited for answers, those included that still wait."""

from __future__ import annotations

import threading


class ThreadWaits:
    """Of one thread.

    Attributes:
        over_s: the seconds of its waits that are over.
        since: when the one began that goes on; 0 for none.
    """

    __slots__ = ("over_s", "since")

    def __init__(self) -> None:
        self.over_s = self.since = 0.0


class BlockedTime:
    """Seconds of waiting, summed over threads. Any thread may use it.

    Each thread has a record of its own, so no lock is needed where callers wait.
    """

    def __init__(self) -> None:
        self._threads: dict[int, ThreadWaits] = {}

    def here(self) -> ThreadWaits:
        """Return the record of the calling thread, which alone may change it."""
        waits = self._threads.get(threading.get_ident())
        if waits is None:
            waits = self._threads[threading.get_ident()] = ThreadWaits()
        return waits

    def total(self, now: float) -> float:
        """Return the seconds so far."""
        records = [(waits.over_s, waits.since) for waits in list(self._threads.values())]
        # A wait may have begun since the caller looked at the clock.
        return sum(over_s + (max(0.0, now - since) if since else 0.0) for over_s, since in records)
