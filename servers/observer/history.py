"""What the page draws over time, in bounded memory: the same for an hour and for a year. Pure."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MOST_COLUMNS = 1024  # further ones are not kept
_NOTHING = math.nan
_SLACK = 1.25  # a window is cut back when it is longer than it must be by so much


@dataclass(frozen=True)
class Drawing:
    """Some columns over the same times.

    Attributes:
        width_s: the seconds between two points.
        times: of the points, the means of buckets that begin then.
        columns: for each name its values; NaN where there was none.
    """

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
        """Add what was measured at a time, which is not before those of earlier calls."""
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
        """Put an end to the bucket that is being filled."""
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
        for place, time in enumerate(self._times):
            places.setdefault(math.floor(time / self.width_s) * self.width_s, []).append(place)
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
        """Add what was measured at a time, in seconds since the job began."""
        for name in values:
            if name not in self.names and len(self.names) < MOST_COLUMNS:
                self.names[name] = None
        known = {name: value for name, value in values.items() if name in self.names}
        for timeline in self.timelines.values():
            timeline.add(at, known)
