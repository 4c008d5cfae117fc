"""What members report of themselves: of each its latest report, and earlier ones to compare it with. Pure.

Reports only tell people how the job is. They are neither logged nor repeated: a scheduler that takes another's place
has none until members make new ones.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvstore import wire
from kvstore.observing.view import AnyReport

WINDOW_S = 6.0  # how far back the earlier report of a pair is
SPACING_S = 1.0  # between reports of that time that are kept
LONG_S, LONG_SPACING_S = 600.0, 30.0  # likewise of the time before


@dataclass
class _Kept:
    """The reports of one member.

    Attributes:
        incarnation: of the member. Another process's counts begin anew.
        latest: the last one that came.
        earlier: when others came, and these; one of them is ``WINDOW_S`` old if it can.
        old: likewise, those before.
    """

    incarnation: int
    latest: AnyReport
    earlier: deque[tuple[float, AnyReport]] = field(default_factory=deque)
    old: deque[tuple[float, AnyReport]] = field(default_factory=deque)


class Reports:
    """See the module."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], _Kept] = {}

    def take(self, report: AnyReport, now: float) -> bool:
        """Take a member's report; return whether members of its role make such ones."""
        node = report.node
        if isinstance(report, wire.WorkerReport) != (node.role == "worker"):
            return False
        kept = self._kept.get((node.role, node.rank))
        if kept is None or kept.incarnation != node.incarnation:
            kept = self._kept[node.role, node.rank] = _Kept(node.incarnation, report)
        kept.latest = report
        earlier, old = kept.earlier, kept.old
        if not earlier or now - earlier[-1][0] >= SPACING_S:
            earlier.append((now, report))
        while len(earlier) > 1 and earlier[1][0] <= now - WINDOW_S:
            first = earlier.popleft()
            if not old or first[0] - old[-1][0] >= LONG_SPACING_S:
                old.append(first)
        while old and old[0][0] < now - LONG_S:
            old.popleft()
        return True

    @property
    def kept(self) -> int:
        """How many reports there are, beside the latest of each member."""
        return sum(len(kept.earlier) + len(kept.old) for kept in self._kept.values())

    def of(self, node: wire.Node) -> tuple[AnyReport, ...]:
        """Return a member's report of some ``WINDOW_S`` ago and its latest one, or one alone; empty for none."""
        kept = self._find(node)
        if kept is None:
            return ()
        before = kept.earlier[0][1]
        return (kept.latest,) if before is kept.latest else (before, kept.latest)

    def over(self, node: wire.Node, seconds: float, fewest: int = 0) -> tuple[AnyReport, AnyReport] | None:
        """Return a member's report of some time ago and its latest one; None if it has made none.

        Args:
            seconds: how old the earlier one is to be, at least.
            fewest: how many rounds a worker must have done since then, how many waves a server must have seen. If there
                is no such report, it is the oldest one.
        """
        kept = self._find(node)
        if kept is None:
            return None
        latest = kept.latest
        for _, report in (*reversed(kept.earlier), *reversed(kept.old)):
            if latest.at - report.at >= seconds and _progress(latest) - _progress(report) >= fewest:
                return report, latest
        return (kept.old or kept.earlier)[0][1], latest

    def _find(self, node: wire.Node) -> _Kept | None:
        kept = self._kept.get((node.role, node.rank))
        return kept if kept is not None and kept.incarnation == node.incarnation else None


def _progress(report: AnyReport) -> int:
    return report.rounds if isinstance(report, wire.WorkerReport) else report.waves
