"""The end of a job as a test plays it: who exits, how, and when, by a clock that is a number."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from kvstore.job.processes import Exit
from launcher.job.tasks import Task
from launcher.supervision.ending import Action, Ending, EndingLimits, Kill
from launcher.supervision.restarts import Restarts

TASKS = [
    Task("scheduler", 0, ("x",), {}),
    Task("server", 0, ("x",), {}),
    *(Task("worker", i, ("x",), {}) for i in (0, 1)),
]


SCHEDULER, SERVER, WORKER_0, WORKER_1 = range(4)
LIMITS = EndingLimits()
TERM, KILL = Kill(signal.SIGTERM), Kill(signal.SIGKILL)


class Run:
    """An ending, and its clock."""

    def __init__(self, tasks: Sequence[Task] = TASKS, restarts: Restarts | None = None) -> None:
        self.now = 100.0
        self.leftovers = False
        self.ending = Ending(tasks, LIMITS, restarts)

    def exit(self, *indices: int, code: int = 0, signum: int = 0) -> list[Action]:
        actions: list[Action] = []
        for index in indices:
            actions += self.ending.exited(index, Exit(code, signum), self.now)
        return actions + self.tick()

    def signal(self, signum: int) -> list[Action]:
        return self.ending.signalled(signum, self.now) + self.tick()

    def tick(self) -> list[Action]:
        return self.ending.tick(self.now, lambda: self.leftovers)

    def pass_deadline(self) -> list[Action]:
        """Nothing happens before it, and then what does is returned."""
        assert self.ending.deadline is not None
        self.now = self.ending.deadline - 0.001
        assert self.tick() == []
        self.now = self.ending.deadline
        return self.tick()
