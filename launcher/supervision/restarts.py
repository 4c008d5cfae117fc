"""Which processes of a job may die without ending it, and when they are started again. No I/O.

A process that dies is started again after a short delay, in which a standby takes over without a new interpreter beside
it. One that dies soon after its start waits longer each time, so that a loop does no harm. One that ends by itself with
an error, again and again, is given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.errors import REPLACED_EXIT
from kvstore.job.contract import member_title
from kvstore.job.processes import Exit
from launcher.job.description import Job
from launcher.job.tasks import Task

#     a process that dies                     is started again after
#     server, standby                         0.1 s, so that a standby takes over first
#       soon after its start, n times         0.5 s times 2^n, 30 s at most; a worker, too
#     worker, as long as enough are left      0.1 s, too; the job waits for those it needs
#     scheduler                               0 s: nobody takes its place
#       soon after its start, n times         0.5 s times 2^(n-1), 1 s at most
#     aggregator                              never: the workers of its host send to the servers themselves
#     any, with ERRORS errors of its own      never
#     any, after `limit` restarts in all      never
#     any, on a host that is lost             never
#
# What is never started again: the job goes on without a server's standby or a worker, and ends without a scheduler.
TAKEOVER_S = 0.1  # before a server or standby is started again
DELAY_S = 0.5  # likewise, if it dies soon after its start; doubled each time
LONGEST_S = 30.0  # of these delays
SCHEDULER_LONGEST_S = 1.0  # nobody takes its place: beyond the heartbeat's limit all others give the job up
SOON_S = 5.0  # a process that lives no longer has died soon
ERRORS = 3  # as many errors of its own, each soon after a start: the next start would end so, too


class Fate(NamedTuple):
    """What becomes of a process that has died."""

    start: int  # which start of it this was
    at: float | None  # when to start it again; None if it is given up
    text: str  # what to tell the user, after how it has ended; empty for what the scheduler says anyway


class Restarts:
    """The restarts of one job.

    Args:
        roles: the roles whose processes may die.
        limit: how many times processes are started again, in all.
        min_workers: workers may die as long as so many are left, and aggregators; 0 if none may.
        max_workers: others may be added, up to so many; 0 if none is.
    """

    def __init__(
        self, tasks: Sequence[Task], roles: frozenset[str], limit: int, min_workers: int = 0, max_workers: int = 0
    ) -> None:
        self._tasks = tasks
        self._roles = roles
        self._limit = limit
        self._workers = self._left = sum(task.role == "worker" for task in tasks)
        self._min_workers, self.max_workers = min_workers, max_workers
        self._used = 0
        self._starts: dict[int, int] = {}
        self._began: dict[int, float] = {}
        self._soon: dict[int, int] = {}  # how many times in a row it has died soon
        self._errors: dict[int, int] = {}  # and by an error of its own

    @classmethod
    def of(cls, job: Job, tasks: Sequence[Task]) -> Restarts:
        return cls(tasks, survivable(job), job.restarts, job.cluster.min_workers, job.cluster.max_workers)

    @property
    def limited(self) -> bool:
        """Whether anything is started again, so that it is news that something is not."""
        return self._limit > 0

    def spares(self, index: int) -> bool:
        """Whether a process is a worker or an aggregator without which the job may go on."""
        return self._tasks[index].role in ("worker", "aggregator") and self._min_workers > 0

    def enough(self, coming: int) -> bool:
        """Whether enough workers are left, or will be with so many that are to be started again, or may be added."""
        return self._left + coming >= self._min_workers or self.max_workers > 0

    def add(self) -> None:
        """There is one more worker."""
        self._workers += 1
        self._left += 1

    def too_few(self, index: int) -> str:
        """Say why the job does not go on without a worker, after how it has ended; empty if that was never possible."""
        if self._tasks[index].role != "worker" or self._left >= self._min_workers:
            return ""
        return f"; {self._left} of {self._workers} workers are left, and --min-workers is {self._min_workers}"

    def survivable(self, index: int) -> bool:
        return self._tasks[index].role in self._roles

    def start(self, index: int) -> int:
        """Which start of it this process is, or was if it has died."""
        return self._starts.get(index, 1)

    def begins(self, index: int, now: float) -> int:
        """A process is started now. Return how often it has been started, with this."""
        self._began[index] = now
        self._starts[index] = self._starts.get(index, 0) + 1
        if self._starts[index] > 1 and self._tasks[index].role == "worker":
            self._left += 1
        return self._starts[index]

    def dies(self, index: int, how: Exit, now: float, possible: bool = True) -> Fate:
        """A process has died. `possible`: whether it can be started again at all; its host may be lost."""
        self._left -= self._tasks[index].role == "worker"
        soon = now < self._began.get(index, now) + SOON_S
        by_itself = not how.signum and not how.text and how.code != REPLACED_EXIT
        self._soon[index] = self._soon.get(index, 0) + 1 if soon else 0
        self._errors[index] = self._errors.get(index, 0) + 1 if soon and by_itself else 0
        start = self.start(index)
        why = self._why_not(index, possible)
        if why:
            return Fate(start, None, f"{why}{self._consequence(index)}")
        self._used += 1
        delay = self._delay(index)
        slow = f"it is started again in {delay:g} s ({self._used} of {self._limit} restarts)"
        return Fate(start, now + delay, slow if delay > 1 else "")

    def _why_not(self, index: int, possible: bool) -> str:
        if not possible:
            return "it cannot be started again"
        if self._used >= self._limit:
            return f"all {self._limit} restarts are used up (--restarts)" if self._limit else "nothing is restarted"
        if self._errors[index] >= ERRORS:
            return f"it has ended so {ERRORS} times soon after its start, and is given up"
        return ""

    def _consequence(self, index: int) -> str:
        task = self._tasks[index]
        served = task.role in ("server", "standby")
        return f"; {member_title('server', task.rank)} has no standby from now on" if served else ""

    def _delay(self, index: int) -> float:
        """A server's standby takes over meanwhile. The scheduler is missed from the beginning."""
        times = self._soon[index]
        if self._tasks[index].role == "scheduler":
            return min(DELAY_S * 2.0 ** (times - 1), SCHEDULER_LONGEST_S) if times else 0.0
        return min(DELAY_S * 2.0**times, LONGEST_S) if times else TAKEOVER_S


def survivable(job: Job) -> frozenset[str]:
    servers = {"server", "standby"} if job.cluster.replicas else set()
    return frozenset(servers | ({"scheduler"} if job.restarts else set()))
