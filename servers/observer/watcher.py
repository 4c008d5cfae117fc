"""Looks at a job again and again, keeps what is drawn, and tells the page. No sockets, no clock of its own."""

from __future__ import annotations

import json
import math
import threading
from array import array
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from kvstore.errors import KVStoreError
from kvstore.observing.view import JobView
from servers.observer.feed import Feed
from servers.observer.history import History
from servers.observer.snapshot import drawn, snapshot


class ViewSource(Protocol):
    """Tells how a job is: an observer's session with the scheduler."""

    def look(self) -> JobView:
        """Return how the job is now.

        Raises:
            KVStoreError: the scheduler does not answer.
        """

    def close(self) -> None:
        """Close the link."""

    def wait(self, seconds: float) -> None:
        """Return after so many seconds, after ``wake``, or when a member has died."""

    def wake(self) -> None:
        """End ``wait``. Any thread may call it, until ``close``."""


class JobWatcher:
    """The latest state of one job, and its history.

    Args:
        connect: makes a session. It raises KVStoreError if the scheduler is not there.
        feed: where each state goes.
        title: what the job is called.

    Attributes:
        view: the latest view; None if there has been none yet.
        answered: when it came, by the clock of ``look``.
    """

    def __init__(
        self,
        connect: Callable[[], ViewSource],
        feed: Feed,
        title: str = "",
    ) -> None:
        self._connect = connect
        self._feed = feed
        self._title = title
        self._session: ViewSource | None = None
        self._history = History()
        self._lock = threading.Lock()  # around the history, which the web server's threads read
        self._closing = threading.Lock()  # around the link, which other threads may wake
        self.answered = -math.inf
        self._began = 0.0
        self.view: JobView | None = None

    def look(self, now: float) -> bool:
        """Look once, and tell the page. Return whether the scheduler has answered.

        Args:
            now: the time, by a monotonic clock.
        """
        try:
            if self._session is None:
                self._session = self._connect()
            view = self._session.look()
        except KVStoreError as error:
            self.close()
            self._tell("silent", text=str(error), since=None if self.view is None else now - self.answered)
            return False
        if self.view is None:
            self._began = now - max(0.0, view.at - view.started)
        self.view, self.answered = view, now
        age = now - self._began  # by this process's clock: another scheduler may have taken the place of the first
        self._tell("view", title=self._title, age=age, **snapshot(view))
        with self._lock:
            self._history.add(age, drawn(view))
        return True

    def wait(self, seconds: float) -> bool:
        """Return when a member has died, and after so many seconds or ``wake``; at once, and False, without a link."""
        session = self._session
        if session is None:
            return False
        with suppress(KVStoreError):  # the next look tells it
            session.wait(seconds)
        return True

    def wake(self) -> None:
        """End ``wait``. Any thread may call it."""
        with self._closing:
            if self._session is not None:
                self._session.wake()

    def end(self, text: str) -> None:
        """Tell the page that the job is over, and why. It keeps what it shows."""
        self._tell("over", text=text)
        self._feed.close()

    def close(self) -> None:
        """Close the link to the scheduler. The next look makes another."""
        with self._closing:
            session, self._session = self._session, None
        if session is not None:
            session.close()

    def history(self, timeline: str, member: str = "") -> bytes:
        """Return what is drawn as JSON: the job's columns, or those of one member.

        Args:
            timeline: ``recent``, ``hours`` or ``all``.
            member: its name.

        Raises:
            LookupError: there is no such timeline or member.
        """
        with self._lock:
            found = self._history.timelines[timeline]
            names = [name for name in self._history.names if _of(name) == member]
            if member and not names:
                raise LookupError(member)
            drawing = found.drawing(names)
        columns = {name.removeprefix(f"{member} "): _plain(column) for name, column in drawing.columns.items()}
        told = {"width": drawing.width_s, "times": _plain(drawing.times), "columns": columns}
        return json.dumps(told, separators=(",", ":")).encode()

    def _tell(self, kind: str, **told: Any) -> None:
        self._feed.publish(json.dumps({"kind": kind, **told}, separators=(",", ":"), allow_nan=False).encode())


def _of(column: str) -> str:
    """The member that a column is of; empty for the job."""
    first, _, rest = column.partition(" ")
    rank, _, _ = rest.partition(" ")
    return f"{first} {rank}" if first in ("worker", "server", "standby", "aggregator") and rank.isdigit() else ""


def _plain(column: array[float]) -> list[float | None]:
    """The numbers with so many digits as can be seen; None for none."""
    return [float(f"{value:.5g}") if abs(value) < 1e5 else round(value) if value == value else None for value in column]
