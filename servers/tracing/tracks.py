"""What one thread did, as spans that lie one after the other or inside each other. Pure.

Viewers show spans of a track as a stack, and cannot show two that overlap otherwise. A thread makes none, but an
exception may cut one short, and the clock's steps are finite: what overlaps is cut.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class TrackSpan:
    """Something that took a while.

    Attributes:
        start, end: in seconds.
        name: what it was.
        args: what else is known of it.
    """

    start: float
    end: float
    name: str
    args: Mapping[str, Any] = field(default_factory=dict)


class Track:
    """The spans of one thread.

    Args:
        spans: in any order; they are put in order, outer ones first, and cut where they overlap.

    Attributes:
        spans: in order.
    """

    def __init__(self, spans: Sequence[TrackSpan]) -> None:
        self.spans = sorted(spans, key=lambda span: (span.start, -span.end))
        self._starts = [span.start for span in self.spans]
        self._outer: list[int] = []  # of each span, the place of the one around it; -1 for none
        open_: list[int] = []
        for place, span in enumerate(self.spans):
            while open_ and self.spans[open_[-1]].end <= span.start and not self._same(open_[-1], place):
                open_.pop()
            span.end = max(span.end, span.start)
            if open_:
                span.end = min(span.end, self.spans[open_[-1]].end)
            self._outer.append(open_[-1] if open_ else -1)
            open_.append(place)

    def around(self, at: float) -> TrackSpan | None:
        """Return the innermost span at a time; None if there is none."""
        place = bisect_right(self._starts, at) - 1
        while place >= 0 and self.spans[place].end < at:
            place = self._outer[place]
        return self.spans[place] if place >= 0 else None

    def outside(self, place: int) -> TrackSpan | None:
        """Return the span around the one at ``place``; None if there is none."""
        outer = self._outer[place]
        return self.spans[outer] if outer >= 0 else None

    def _same(self, one: int, other: int) -> bool:
        """Whether both begin and end at one moment."""
        first, second = self.spans[one], self.spans[other]
        return first.start == second.start and first.end == second.end
