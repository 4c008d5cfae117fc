"""Which rounds a trace has that begins while the job runs, and when it is complete. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kvstore import wire
from kvstore.errors import ConfigError
from kvstore.job.valid_values import RoundWindow
from kvstore.observing.view import JobView, MemberView, Span

AHEAD_S = 1.0  # so much before its first round all members know of a trace


def rounds_ahead(view: JobView, wanted: RoundWindow) -> RoundWindow:
    """Return the rounds of a trace.

    Args:
        view: the job now.
        wanted: these rounds; if the first is 1 and over, as many from now on.

    Raises:
        ConfigError: they are over.
    """
    latest = max((span.latest.rounds for _, span in _at_work(view)), default=0)
    if wanted.first > latest or (wanted.first > 1 and wanted.last > latest):
        return wanted
    if wanted.first > 1:
        raise ConfigError(
            f"rounds {wanted} are over: the job is in round {latest}; a number alone, such as FILE:100, takes the next "
            "rounds"
        )
    passed = max(span.rate("rounds") * (AHEAD_S + member.silent_s) for member, span in _at_work(view))
    first = latest + 1 + math.ceil(passed)
    return RoundWindow(first, first + wanted.last - 1)


def are_over(view: JobView, rounds: RoundWindow) -> bool:
    """Return whether all workers that are at work have passed these rounds. It is False before any has reported."""
    if not any(member.worker is not None for member in view.of_role("worker")):
        return False
    return all(span.latest.rounds > rounds.last for _, span in _at_work(view))


def notes_due_s(view: JobView) -> float:
    """Return after how many seconds what members have noted by now has come: they send it about as often as beats."""
    return 2 * AHEAD_S + 2 * max((member.silent_s for member in view.members if member.state == "ready"), default=0.0)


def _at_work(view: JobView) -> Iterator[tuple[MemberView, Span[wire.WorkerReport]]]:
    for member in view.of_role("worker"):
        if member.state == "ready" and member.worker is not None:
            yield member, member.worker
