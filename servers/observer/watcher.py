"""Looks at a job again and again, keeps what is drawn, and tells the page. No sockets, no clock of its own."""

from __future__ import annotations

import json
import math
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvstore.errors import KVStoreError
from kvstore.observing.observer_session import ObserverSession
from kvstore.observing.view import JobView
from servers.observer.page_snapshot import drawn, snapshot

MOST_COLUMNS = 1024  # further ones are not kept
_NOTHING = math.nan
# A window is cut back when it is longer than it must be by so much: to delete the first element of each of 1,024
# columns at every look would move all others each time.
_SLACK = 1.25


class Feed:
    """The latest state of the job, handed from the thread that looks to the threads that serve streams of events.

    A stream that is slow misses some states, and never holds up others.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._number = 0
        self._message = b""
        self._closed = False

    def publish(self, message: bytes) -> None:
        """Put a message in the place of the latest, unless that was the last."""
        with self._changed:
            if self._closed:
                return
            self._number += 1
            self._message = message
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def after(self, number: int, timeout_s: float) -> tuple[int, bytes, bool]:
        """Wait for a message after the one with ``number``.

        Returns:
            The latest message's number, the message, or nothing if none came in time, and whether it is the last.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._number <= number and not self._closed:
                left = deadline - time.monotonic()
                if left <= 0:
                    return number, b"", False
                self._changed.wait(left)
            fresh = self._number > number
            return self._number, self._message if fresh else b"", self._closed


# ---- what is drawn over time, in bounded memory: the same for an hour and for a year


@dataclass(frozen=True)
class Drawing:
    """Columns over the same times, which are ``width_s`` apart; NaN where there was no value."""

    width_s: float
    times: array[float]
    columns: Mapping[str, array[float]]


class Timeline:
    """Columns over a stretch of time: means over buckets of one width.

    Args:
        width_s: the width of a bucket.
        capacity: how many of them are kept.
        grows: whether the stretch begins with the job: then, instead of forgetting the oldest bucket, buckets become
            twice as wide.
    """

    def __init__(self, width_s: float, capacity: int, *, grows: bool = False) -> None:
        self.width_s = width_s
        self._capacity = capacity
        self._grows = grows
        self._times = array("d")
        self._columns: dict[str, array[float]] = {}
        self._begun = -math.inf  # when the bucket that is being filled began
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, at: float, values: Mapping[str, float]) -> None:
        """Times must not fall."""
        begun = math.floor(at / self.width_s) * self.width_s
        if begun > self._begun:
            self._close()
            self._begun = begun
        for name, value in values.items():
            if math.isfinite(value):
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = total + value, count + 1

    def drawing(self, names: Iterable[str]) -> Drawing:
        """Return these columns up to now, with the bucket that is not full yet as the last point."""
        times = self._times[-self._capacity :]
        length = len(times)
        columns = {}
        for name in names:
            column = self._columns.get(name)
            columns[name] = array("d", [_NOTHING]) * length if column is None else column[len(column) - length :]
            total, count = self._sums.get(name, (0.0, 0))
            if self._sums:
                columns[name].append(total / count if count else _NOTHING)
        if self._sums:
            times.append(self._begun)
        return Drawing(self.width_s, times, columns)

    def _close(self) -> None:
        if not self._sums:
            return
        for name in self._sums:
            if name not in self._columns and len(self._columns) < MOST_COLUMNS:
                self._columns[name] = array("d", [_NOTHING]) * len(self._times)
        self._times.append(self._begun)
        for name, column in self._columns.items():
            total, count = self._sums.get(name, (0.0, 0))
            column.append(total / count if count else _NOTHING)
        self._sums = {}
        if self._grows and len(self._times) >= self._capacity:
            self._halve()
        elif len(self._times) > _SLACK * self._capacity:
            del self._times[: -self._capacity]
            for column in self._columns.values():
                del column[: -self._capacity]

    def _halve(self) -> None:
        self.width_s *= 2
        places: dict[float, list[int]] = {}
        for place, begun in enumerate(self._times):
            places.setdefault(math.floor(begun / self.width_s) * self.width_s, []).append(place)
        self._times = array("d", places)
        for name, column in self._columns.items():
            self._columns[name] = array("d", (_mean([column[place] for place in each]) for each in places.values()))


def _mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else _NOTHING


class History:
    """The same columns at three resolutions: ``recent``, ``hours`` and ``all``."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}  # of all columns, in the order in which they came
        self.timelines = {
            "recent": Timeline(1.0, 600),
            "hours": Timeline(15.0, 480),
            "all": Timeline(5.0, 480, grows=True),
        }

    def add(self, at: float, values: Mapping[str, float]) -> None:
        for name in values:
            if name not in self.names and len(self.names) < MOST_COLUMNS:
                self.names[name] = None
        known = {name: value for name, value in values.items() if name in self.names}
        for timeline in self.timelines.values():
            timeline.add(at, known)


# ---- looks


class JobWatcher:
    """The latest state of one job, and its history.

    Attributes:
        view: the latest view; None if there has been none yet.
        answered: when it came, by the clock of ``look``.
    """

    def __init__(
        self,
        connect: Callable[[], ObserverSession],
        feed: Feed,
        title: str = "",
    ) -> None:
        self._connect = connect
        self._feed = feed
        self._title = title
        self._session: ObserverSession | None = None
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
        """JSON of the job's columns, or of a member's; ``recent``, ``hours`` or ``all``; LookupError for others."""
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
