"""How long the callers of a process have waited for answers, those included that still wait."""

from __future__ import annotations

import threading


class BlockedTime:
    """Seconds of waiting, summed over threads. Any thread may use it.

    Each thread has an entry of its own, so no lock is needed where callers wait.
    """

    def __init__(self) -> None:
        self._threads: dict[int, list[float]] = {}  # by thread: seconds of waits that are over, and since when it waits

    def begin(self, now: float) -> None:
        """The calling thread waits from ``now`` on."""
        entry = self._threads.get(threading.get_ident())
        if entry is None:
            entry = self._threads[threading.get_ident()] = [0.0, 0.0]
        entry[1] = now

    def end(self, now: float) -> None:
        """The calling thread waits no more."""
        entry = self._threads[threading.get_ident()]
        since, entry[1] = entry[1], 0.0
        if since:
            entry[0] += now - since

    def total(self, now: float) -> float:
        """Return the seconds so far."""
        entries = [tuple(entry) for entry in list(self._threads.values())]
        return sum(over + (now - since if since else 0.0) for over, since in entries)
