"""What `Ending` has the supervisor do. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.job.exits import Exit


@dataclass(frozen=True)
class Say:
    """Print a line to the user."""

    text: str


@dataclass(frozen=True)
class Tell:
    """Report a failed process to the scheduler.

    Args:
        index: of its task.
        how: what happened to it.
    """

    index: int
    how: str


@dataclass(frozen=True)
class Lose:
    """Report a process that has died to the scheduler. The job goes on.

    Args:
        index: of its task.
        how: what happened to it.
        start: which start of it this was.
        final: whether it is not started again.
    """

    index: int
    how: str
    start: int
    final: bool


@dataclass(frozen=True)
class Restart:
    """Start a process again.

    Args:
        index: of its task.
        start: which start of it this is.
        before: how the one before has ended.
        since: when it did.
    """

    index: int
    start: int
    before: Exit
    since: float


@dataclass(frozen=True)
class Kill:
    """Send a signal to every process of the job."""

    signum: int


Action = Say | Tell | Lose | Restart | Kill
