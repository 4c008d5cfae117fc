"""What has happened to a job, line by line, for observers. Pure: the time is passed in."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

from kvstore import wire
from kvstore.wire.guests import MOST_EVENTS


class Events:
    """The latest events of one job. They are numbered from 1 on."""

    def __init__(self) -> None:
        self._lines: deque[tuple[float, str]] = deque(maxlen=MOST_EVENTS)
        self._count = 0

    def add(self, now: float, text: str) -> None:
        """Note that something has happened."""
        self._lines.append((now, text[: wire.MAX_REASON]))
        self._count += 1

    def after(self, number: int) -> tuple[int, list[list[Any]]]:
        """Return those after event ``number`` that are kept, each as its time and a line, behind the first's number.

        If there is no event ``number`` yet, it was one of a scheduler before this, and all are returned.
        """
        first = self._count - len(self._lines) + 1
        skipped = min(max(0, number + 1 - first), len(self._lines)) if number <= self._count else 0
        return first + skipped, [[at, text] for at, text in itertools.islice(self._lines, skipped, None)]
