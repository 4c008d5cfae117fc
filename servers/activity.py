"""What a core that serves has done so far, and who waits in it, for its reports. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Lateness(NamedTuple):
    """Who came last; see ``ServerReport``.

    Attributes:
        waves: how many rounds have been judged.
        came_last: for each worker of the job, in how many of them it came last.
        alone_s: for each worker, for how many seconds others have waited for it alone.
    """

    waves: int
    came_last: Sequence[int]
    alone_s: Sequence[float]


class Waits(NamedTuple):
    """The requests that wait at one moment.

    Attributes:
        waiting: the workers that wait.
        missing: those they wait for.
        oldest_s: for how many seconds the oldest request has waited; 0 for none.
        why: what it waits for.
    """

    waiting: Sequence[int] = ()
    missing: Sequence[int] = ()
    oldest_s: float = 0.0
    why: str = ""


def together(waits: Iterable[Waits]) -> Waits:
    """Return what ``waits`` of several stores are together: who waits in any, and why the oldest request does."""
    parts = [part for part in waits if part.waiting]
    if len(parts) < 2:
        return parts[0] if parts else Waits()
    waiting = {rank for part in parts for rank in part.waiting}
    missing = {rank for part in parts for rank in part.missing}
    oldest = max(parts, key=lambda part: part.oldest_s)
    return Waits(sorted(waiting), sorted(missing), oldest.oldest_s, oldest.why)


class ServedActivity(NamedTuple):
    """What a core has done so far, and which workers wait in it.

    Attributes:
        rounds: the highest number of rounds, or of updates, of any segment.
        held: bytes of parameters.
        lateness: which workers came last.
        waits: the requests that wait.
    """

    rounds: int
    held: int
    lateness: Lateness
    waits: Waits
