"""What follows from the reports of members together: who waits for whom, and the rounds of the job. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

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


def link_rates(span: Span[wire.WorkerReport]) -> list[tuple[float, float]]:
    """Return bytes to and from each server, or the worker's aggregator alone, in a second; none for one report."""
    if span.seconds <= 0:
        return []
    grown = zip(span.grown("sent"), span.grown("received"), strict=False)
    return [(sent / span.seconds, received / span.seconds) for sent, received in grown]


def logged_values(span: Span[wire.WorkerReport]) -> dict[str, float]:
    """Return the latest numbers that the worker's program has logged, by its names."""
    return {str(name): float(value) for name, value in span.latest.values}


def job_rounds_per_s(view: JobView) -> float | None:
    """Return how many rounds a second the job does: as its workers do in the middle; None if nobody says."""
    rates = [
        member.worker.rate("rounds")
        for member in view.of_role("worker")
        if member.worker is not None and member.worker.seconds > 0 and member.state == "ready"
    ]
    return statistics.median(rates) if rates else None
