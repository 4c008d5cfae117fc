"""The straggler of a running job: named when there is one, when another is, or the cause is, and when it is over.

Pure: the time is passed in. Members' reports say who it is. If they do not say by what, that worker and another one are
asked some times where they are in their code, as soon as there is a suspicion. Nobody else is asked.

Reports only tell people how the job is. They are neither logged nor repeated: a scheduler that takes another's place
has none until members make new ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

from kvstore import wire
from kvstore.observing.advice import names_of, of_straggler
from kvstore.observing.straggler import ENOUGH, FEWEST_WAVES, PairedLooks, Straggler, find_straggler
from kvstore.observing.view import AnyReport, Span
from servers.scheduler.inquiries import Found, Sighting
from servers.scheduler.members import JobMember, Members, MemberState

EVERY_S = 1.0  # between two judgements
SUSPICION_S = 3.0  # of how long a time before looks begin; it must go on for so long when it is named, too
SUSPICIOUS_WAVES = 8
LOOK_S = 0.1  # between looks, on average
MOST_LOOKS = 40
PATIENCE_S = 4.0  # how long it may take until the cause is known
TOGETHER_S = 3.0  # how long it may take until it is known which of several workers of a host it is
SETTLED_S = 2.0  # how long a slow line must go on: for a report, a newly busy worker looks like one
OVER = 3  # judgements in a row that must not find it before it is over, or find another cause
MOST_LINES, LINES_S = 4, 120.0  # of news in so many seconds: what comes and goes must not fill the terminal

R = TypeVar("R", wire.WorkerReport, wire.ServerReport)


WINDOW_S = 6.0  # how far back the earlier report of a pair is
SPACING_S = 1.0  # between reports of that time that are kept
LONG_S, LONG_SPACING_S = 600.0, 30.0  # likewise of the time before


@dataclass
class _Kept:
    """The reports of one member: the latest, earlier ones and when they came, and old ones before these.

    One of the earlier ones is ``WINDOW_S`` old if it can. Another process's counts begin anew, hence ``incarnation``.
    """

    incarnation: int
    latest: AnyReport
    earlier: deque[tuple[float, AnyReport]] = field(default_factory=deque)
    old: deque[tuple[float, AnyReport]] = field(default_factory=deque)


class Reports:
    """Of each member its latest report, and earlier ones to compare it with."""

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
        """Return a member's report of ``seconds`` ago or more and its latest one; None if it has made none.

        A worker must have done ``fewest`` rounds since then, a server must have seen so many waves. If there is no such
        report, it is the oldest one.
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


class StragglerWatch:
    """Names the straggler of one job."""

    def __init__(
        self,
        members: Members,
        reports: Reports,
        look: Callable[[str, list[int], float, Found], None],
        news: Callable[[str], None],
    ) -> None:
        self._members = members
        self._reports = reports
        self._look = look
        self._news = news
        self._judges_at = 0.0
        self._looks: PairedLooks | None = None  # at whoever is suspected
        self._looks_at = 0.0
        self._since = 0.0  # when the present straggler was found first
        self._line_since = 0.0  # since when it has looked like a slow line
        self._found: tuple[int, ...] = ()
        self._named: Straggler | None = None
        self._said: deque[float] = deque(maxlen=MOST_LINES)  # when the latest lines of news were
        self._missed = self._changed = 0  # judgements that have not found the one that is named, or another cause

    def tick(self, now: float) -> None:
        if now >= self._judges_at:
            self._judges_at = now + EVERY_S
            self._judge(now)
        if self._looking and now >= self._looks_at:
            looks = cast("PairedLooks", self._looks)
            # Not in step with rounds: the parts of multiples of the golden ratio are spread evenly.
            self._looks_at = now + LOOK_S * (0.5 + looks.count * 0.618034 % 1)
            self._look("worker", sorted((looks.rank, looks.other)), now, lambda seen: _take(looks, seen))

    def due(self) -> float | None:
        return self._looks_at if self._looking else None

    @property
    def _looking(self) -> bool:
        return self._looks is not None and self._looks.count < MOST_LOOKS

    def _judge(self, now: float) -> None:
        workers = self._ready("worker")
        found = self._find(workers, WINDOW_S, FEWEST_WAVES)
        recent = self._find(workers, SUSPICION_S, SUSPICIOUS_WAVES)
        self._suspect(found or recent, workers, now)
        if recent is None or recent.cause != "network":
            self._line_since = now
        if found is None or recent is None or set(found.ranks).isdisjoint(recent.ranks):  # it was late for a moment
            self._found = ()
            self._missed += 1
            named = self._named
            if named is not None and self._missed >= OVER:
                holds = "holds" if len(named.ranks) == 1 else "hold"
                if self._say(f"{names_of(named)} {holds} nobody up any more", now):
                    self._named = None
            return
        if set(found.ranks).isdisjoint(self._found):
            self._since = now
        self._found = found.ranks
        self._missed = 0
        self._name(self._with_cause(found), now)

    def _name(self, found: Straggler, now: float) -> None:
        """Name it and its cause, unless that has been said, or not enough is known yet."""
        before = self._named
        patience_s = PATIENCE_S if found.cause == "local" and self._looking else 0.0
        if len(found.ranks) > 1:  # until their aggregator tells them apart, one of them looks like a slow line of all
            patience_s = max(patience_s, TOGETHER_S)
        if now - self._since < patience_s or (found.cause == "network" and now - self._line_since < SETTLED_S):
            return
        if before is not None and before.ranks == found.ranks:
            same = found.cause in ("local", before.cause)
            self._changed = 0 if same else self._changed + 1
            if same or (before.cause != "local" and self._changed < OVER):
                return
        seen = "" if self._looks is None or found.cause == "network" else self._looks.words
        if self._say(of_straggler(found, seen).text, now):
            self._named = found

    def _say(self, line: str, now: float) -> bool:
        """Return whether the line has been said: not if there have been too many."""
        if len(self._said) == MOST_LINES and now - self._said[0] < LINES_S:
            return False
        self._said.append(now)
        self._news(line)
        return True

    def _with_cause(self, found: Straggler) -> Straggler:
        """Return ``found`` with the cause that looks have shown, if reports do not say it."""
        looks = self._looks
        if found.cause != "local" or looks is None or looks.rank not in found.ranks or looks.count < ENOUGH:
            return found
        return replace(found, cause=looks.cause or found.cause)

    def _suspect(self, suspect: Straggler | None, workers: list[JobMember], now: float) -> None:
        """Begin to look at whoever is suspected, and busy by itself; stop if nobody is."""
        if suspect is None or suspect.cause == "network":
            if suspect is None and self._named is None:
                self._looks = None
            return
        if self._looks is not None and self._looks.rank in suspect.ranks:
            return
        others = [member.rank for member in workers if member.rank not in suspect.ranks]
        self._looks = PairedLooks(suspect.ranks[0], others[0]) if others else None
        self._looks_at = now

    def _find(self, workers: list[JobMember], seconds: float, fewest_waves: int) -> Straggler | None:
        """Return the straggler of the last ``seconds``, or of as long as there have been so many waves."""

        def spans(kind: type[R], members: list[JobMember]) -> dict[int, Span[R]]:
            found: dict[int, Span[R]] = {}
            for member in members:
                pair = self._reports.over(member.node, seconds, fewest_waves)
                if pair is not None and isinstance(pair[0], kind) and isinstance(pair[1], kind):
                    found[member.rank] = Span(pair[0], pair[1])
            return found

        of_workers = spans(wire.WorkerReport, workers)
        if len(of_workers) < 2:
            return None
        of_servers, of_standbys, of_aggregators = (
            [*spans(wire.ServerReport, self._ready(role)).values()] for role in ("server", "standby", "aggregator")
        )
        return find_straggler(of_workers, of_servers + of_standbys, of_aggregators, fewest_waves=fewest_waves)

    def _ready(self, role: str) -> list[JobMember]:
        return [member for member in self._members.of(role) if member.state is MemberState.READY]


def _take(looks: PairedLooks, seen: Mapping[int, Sighting]) -> None:
    own, other = (seen.get(rank) for rank in (looks.rank, looks.other))
    if own is not None and other is not None and own.stacks is not None and other.stacks is not None:
        looks.add(own.stacks, other.stacks)
