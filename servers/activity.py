"""The work that a core has done so far, and the workers that wait in it, for its reports. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Lateness(NamedTuple):
    """Which workers came last; see ``ServerReport``."""

    waves: int  # how many rounds have been judged
    came_last: Sequence[int]  # by worker, in how many of them it came last
    alone_s: Sequence[float]  # by worker, for how many seconds others have waited for it alone


class Waits(NamedTuple):
    """The requests that wait at one moment."""

    waiting: Sequence[int] = ()  # workers
    missing: Sequence[int] = ()  # the workers that they wait for
    oldest_s: float = 0.0  # for how long the oldest request has waited
    why: str = ""  # what that request waits for


def together(waits: Iterable[Waits]) -> Waits:
    """Return the waits of several stores as one: the workers that wait in any, and why the oldest request does."""
    parts = [part for part in waits if part.waiting]
    if len(parts) < 2:
        return parts[0] if parts else Waits()
    waiting = {rank for part in parts for rank in part.waiting}
    missing = {rank for part in parts for rank in part.missing}
    oldest = max(parts, key=lambda part: part.oldest_s)
    return Waits(sorted(waiting), sorted(missing), oldest.oldest_s, oldest.why)


class Followed(NamedTuple):
    """What is published, and who follows; see ``ServerReport``."""

    version: int = 0
    followers: int = 0
    behind: int = 0


class ServedActivity(NamedTuple):
    """The work that a core has done so far, and which workers wait in it."""

    rounds: int  # the highest number of rounds, or of updates, of any segment
    held: int  # bytes of parameters
    lateness: Lateness
    waits: Waits
    followed: Followed = Followed()
