"""How long the callers of a process have waited for answers, those included that still wait; and what for."""

from __future__ import annotations

import threading

from kvstore.ticket import Operation


class ThreadWaits:
    """Of one thread.

    Attributes:
        over_s: the seconds of its waits that are over.
        since: when the one began that goes on; 0 for none.
        operation: what it waits for; None if the call has a timeout of its own, or if there is no wait.
        verdict: the number of a wait that has been found to be in vain, and why.
    """

    __slots__ = ("operation", "over_s", "since", "verdict")

    def __init__(self) -> None:
        self.over_s = self.since = 0.0
        self.operation: Operation | None = None
        self.verdict: tuple[int, str] = (-1, "")

    @property
    def number(self) -> int:
        """A number for the wait that goes on, which no other long wait of the thread has."""
        return int(1e6 * self.since)


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

    def waiting(self) -> dict[int, ThreadWaits]:
        """Return the records of the threads that wait, by their identifiers."""
        return {ident: waits for ident, waits in list(self._threads.items()) if waits.since}

    def total(self, now: float) -> float:
        """Return the seconds so far."""
        records = [(waits.over_s, waits.since) for waits in list(self._threads.values())]
        # A wait may have begun since the caller looked at the clock.
        return sum(over_s + (max(0.0, now - since) if since else 0.0) for over_s, since in records)
