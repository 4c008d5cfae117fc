"""Two reports of a member that are some seconds apart, made of shares of that time."""

from __future__ import annotations

from typing import Any

from made_reports import server_report, worker_report

from kvstore import wire
from kvstore.observing.view import Span

SECONDS = 10.0
BEFORE = 100.0


def us(share: float) -> int:
    """This share of the time, in microseconds."""
    return round(share * SECONDS * 1e6)


def worker_span(
    rank: int = 0, blocked: float = 0.1, read: float | None = None, rounds: int = 100, **counts: Any
) -> Span[wire.WorkerReport]:
    """A worker that has waited for answers, and for data, for these shares of the time."""
    known = {} if read is None else {"input_us": 1000}
    before = worker_report(rank, at=BEFORE, blocked_us=5_000_000, rounds=7, **known)
    known = {} if read is None else {"input_us": 1000 + us(read)}
    now = BEFORE + SECONDS
    latest = worker_report(rank, at=now, blocked_us=5_000_000 + us(blocked), rounds=7 + rounds, **known, **counts)
    return Span(before, latest)


def server_span(
    last: list[int], alone: list[float], rank: int = 0, role: str = "server", busy: float = 0.1, **counts: Any
) -> Span[wire.ServerReport]:
    """A server at which workers came last so often, and were awaited alone for such shares of the time."""
    before = server_report(
        *(rank, role), at=BEFORE, waves=3, came_last=[1] * len(last), alone_us=[9] * len(last), busy_us=4, received=1
    )
    latest = server_report(
        *(rank, role),
        at=BEFORE + SECONDS,
        waves=3 + counts.pop("waves", sum(last)),
        came_last=[1 + count for count in last],
        alone_us=[9 + us(share) for share in alone],
        busy_us=4 + us(busy),
        received=1000,
        **counts,
    )
    return Span(before, latest)
