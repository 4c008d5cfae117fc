"""What members report of themselves: of each its latest report, and earlier ones to compare it with. Pure.

Reports only tell people how the job is. They are neither logged nor repeated: a scheduler that takes another's place
has none until members make new ones.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvstore.observing.view import AnyReport
from kvstore.wire import Node, WorkerReport

WINDOW_S = 10.0  # how far back the earlier report of a pair is
SPACING_S = 1.0  # between reports that are kept


@dataclass
class _Kept:
    """The reports of one member.

    Attributes:
        incarnation: of the member. Another process's counts begin anew.
        latest: the last one that came.
        earlier: when others came, and these, at least ``SPACING_S`` apart; one of them is ``WINDOW_S`` old if it can.
    """

    incarnation: int
    latest: AnyReport
    earlier: deque[tuple[float, AnyReport]] = field(default_factory=deque)


class Reports:
    """See the module."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], _Kept] = {}

    def take(self, report: AnyReport, now: float) -> bool:
        """Take a member's report; return whether members of its role make such ones."""
        node = report.node
        if isinstance(report, WorkerReport) != (node.role == "worker"):
            return False
        kept = self._kept.get((node.role, node.rank))
        if kept is None or kept.incarnation != node.incarnation:
            kept = self._kept[node.role, node.rank] = _Kept(node.incarnation, report)
        kept.latest = report
        earlier = kept.earlier
        if not earlier or now - earlier[-1][0] >= SPACING_S:
            earlier.append((now, report))
        while len(earlier) > 1 and earlier[1][0] <= now - WINDOW_S:
            earlier.popleft()
        return True

    @property
    def kept(self) -> int:
        """How many reports there are, beside the latest of each member."""
        return sum(len(kept.earlier) for kept in self._kept.values())

    def of(self, node: Node) -> tuple[AnyReport, ...]:
        """Return a member's report of some ``WINDOW_S`` ago and its latest one, or one alone; empty for none."""
        kept = self._kept.get((node.role, node.rank))
        if kept is None or kept.incarnation != node.incarnation:
            return ()
        before = kept.earlier[0][1]
        return (kept.latest,) if before is kept.latest else (before, kept.latest)
