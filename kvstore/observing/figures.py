"""What follows from members' reports: rates and shares of the last six seconds or so; who waits for whom. Pure.

None stands for what is not known yet: a rate takes two reports.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from kvstore import wire
from kvstore.observing.quantities import duration, members
from kvstore.observing.view import JobView, MemberView, Span

_WAITS_FOR = "waits for "  # begins most reasons
LONG_S = 0.5  # what has not waited for so long is a round like any other


@dataclass(frozen=True)
class MemberWait:
    """Workers that wait for others, at one or several members.

    Attributes:
        role, ranks: of the members at which they wait.
        waiting, missing: the workers that wait, and those they wait for.
        seconds: how long the request has waited that waits for longest.
        why: what that waits for, in words.
    """

    role: str
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    seconds: float
    why: str

    @property
    def text(self) -> str:
        who = f"{members('worker', self.waiting)} {'has' if len(self.waiting) == 1 else 'have'}"
        told = f"{members(self.role, self.ranks)}: {who} waited {duration(self.seconds)}"
        if self.why.startswith(_WAITS_FOR):
            return f"{told} for {self.why.removeprefix(_WAITS_FOR)}"
        whom = f" for {members('worker', self.missing)}" if self.missing else ""
        return f"{told}{whom}{': ' if self.why else ''}{self.why}"


def waits(view: JobView, least_s: float = LONG_S) -> list[MemberWait]:
    """Return the waits of at least ``least_s``, the longest first. Members with the same wait are one."""
    found: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[MemberView]] = {}
    for member in view.members:
        report = None if member.server is None else member.server.latest
        if report is not None and member.state == "ready" and report.waiting and report.oldest_us >= least_s * 1e6:
            found.setdefault((member.role, tuple(report.waiting), tuple(report.missing)), []).append(member)
    return sorted(
        (_together(*wait, at) for wait, at in found.items()), key=lambda wait: (-wait.seconds, wait.role, wait.ranks)
    )


def awaited(view: JobView, least_s: float = LONG_S) -> list[int]:
    """Return the ranks of workers that others wait for: at servers, the longest wait first, then at the scheduler."""
    at_servers = [rank for wait in waits(view, least_s) for rank in wait.missing]
    return list(dict.fromkeys([*at_servers, *view.awaited]))


def _together(role: str, waiting: tuple[int, ...], missing: tuple[int, ...], at: list[MemberView]) -> MemberWait:
    def seconds(member: MemberView) -> float:
        assert member.server is not None  # noqa: S101 (for the type checker)
        return member.server.latest.oldest_us / 1e6 + member.silent_s  # the report came with the last sign of life

    longest = max(at, key=seconds)
    assert longest.server is not None  # noqa: S101 (for the type checker)
    ranks = tuple(sorted(member.rank for member in at))
    return MemberWait(role, ranks, waiting, missing, seconds(longest), longest.server.latest.why)


@dataclass(frozen=True)
class WorkerFigures:
    """A worker's.

    Attributes:
        rounds: how many it has pushed.
        rounds_per_s: how many it pushes in a second.
        waits: the part of its time in which a caller waits for answers.
        input: the part in which it waits for data; None, too, if nobody says.
        cores: how many cores its process keeps busy.
        memory: bytes.
        sent_per_s, received_per_s: bytes to and from all servers.
        links: for each server, or for its aggregator alone, bytes to and from it in a second.
        ahead: how many pushes it was ahead of the slowest worker.
        outstanding: requests without an answer.
        values: what the program logs.
    """

    rounds: int
    rounds_per_s: float | None
    waits: float | None
    input: float | None
    cores: float | None
    memory: int
    sent_per_s: float | None
    received_per_s: float | None
    links: tuple[tuple[float, float], ...] = ()
    ahead: int = 0
    outstanding: int = 0
    values: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, span: Span[wire.WorkerReport]) -> WorkerFigures:
        """Return what ``span`` says."""
        latest, before, seconds = span.latest, span.before, span.seconds
        links: tuple[tuple[float, float], ...] = ()
        if seconds > 0:
            grown = zip(span.grown("sent"), span.grown("received"), strict=False)
            links = tuple((sent / seconds, received / seconds) for sent, received in grown)
        knows_input = before.input_us >= 0 and latest.input_us >= 0
        return cls(
            latest.rounds,
            _rate(span, "rounds"),
            _share(span, "blocked_us"),
            _share(span, "input_us") if knows_input else None,
            _share(span, "cpu_us"),
            latest.memory,
            sum(sent for sent, _ in links) if seconds > 0 else None,
            sum(received for _, received in links) if seconds > 0 else None,
            links,
            latest.ahead,
            latest.outstanding,
            {str(name): float(value) for name, value in latest.values},
        )


@dataclass(frozen=True)
class ServerFigures:
    """A server's, a standby's or an aggregator's; see ``WorkerFigures``.

    Attributes:
        busy: the part of its time in which it handles messages.
        held: bytes of parameters.
    """

    rounds: int
    rounds_per_s: float | None
    busy: float | None
    cores: float | None
    memory: int
    held: int
    sent_per_s: float | None
    received_per_s: float | None

    @classmethod
    def of(cls, span: Span[wire.ServerReport]) -> ServerFigures:
        """Return what ``span`` says."""
        return cls(
            span.latest.rounds,
            _rate(span, "rounds"),
            _share(span, "busy_us"),
            _share(span, "cpu_us"),
            span.latest.memory,
            span.latest.held,
            _rate(span, "sent"),
            _rate(span, "received"),
        )


def job_rounds_per_s(view: JobView) -> float | None:
    """Return how many rounds a second the job does: as its workers do in the middle; None if nobody says."""
    rates = [
        member.worker.rate("rounds")
        for member in view.of_role("worker")
        if member.worker is not None and member.worker.seconds > 0 and member.state == "ready"
    ]
    return statistics.median(rates) if rates else None


def _rate(span: Span[wire.WorkerReport] | Span[wire.ServerReport], count: str) -> float | None:
    return span.rate(count) if span.seconds > 0 else None


def _share(span: Span[wire.WorkerReport] | Span[wire.ServerReport], microseconds: str) -> float | None:
    return max(0.0, span.rate(microseconds) / 1e6) if span.seconds > 0 else None
