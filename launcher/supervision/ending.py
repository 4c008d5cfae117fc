"""When and how a job ends. Pure: exits, signals and the time go in, actions come out.

    RUNNING ──a process fails──────────────► WINDOW ──1.5 s, or no worker left──┐
       │                                                                       ▼
       ├──all workers have exited 0────────► LINGER ──1 s──────────────► TERMINATING ──grace──► KILLING
       │                                                                       ▲
       └──a signal to launch.py────────────────────────────────────────────────┘

WINDOW: the survivors are left alone, so that they can raise an error that names the dead one, and print it.
LINGER: the servers and the scheduler have seen the last worker go, and leave by themselves.
TERMINATING: everything has been sent SIGTERM. KILLING: and SIGKILL. From any of these the job is OVER when every
process has exited and none of them has left another behind. The first failure decides the exit code; being ended by
launch.py is no failure.

The scheduler exits with 0 when every worker has left the job, and only then; so do the servers, at its word. Workers
may be there still, for as long as they like: they have closed their stores and go on by themselves, or take their time
to exit, which with torch is seconds on a busy machine. But a server that exits with 0 while the scheduler and workers
stay has not been told to, and has failed them. A server or scheduler that exits with JOB_FAILED_EXIT says that somebody
else has failed: whoever that is gets the time to exit first, and the blame.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.errors import JOB_FAILED_EXIT
from launcher.job.tasks import Task
from launcher.supervision.exits import Exit


class Phase(enum.Enum):
    """How far the job is; see the top of this file."""

    RUNNING = "running"
    WINDOW = "window"
    LINGER = "linger"
    TERMINATING = "terminating"
    KILLING = "killing"
    OVER = "over"


@dataclass(frozen=True)
class EndingLimits:
    """How long, in seconds, each phase may last. Once it is known who has failed, their sum over any path is under 5.

    Args:
        window: for survivors of a failure to say so.
        linger: for servers and scheduler to leave after the last worker.
        patience: for the scheduler to follow a server that left with 0 before the workers did.
        blame: for whoever has failed to exit when a server or the scheduler says that somebody has: an interpreter with
            torch in it takes seconds to end on a busy machine.
        grace: between SIGTERM and SIGKILL, after a failure or a signal.
        short_grace: the same, when all workers have exited with 0.
        kill: after SIGKILL, for the kernel to be done with it.
    """

    window: float = 1.5
    linger: float = 1.0
    patience: float = 3.0
    blame: float = 10.0
    grace: float = 2.0
    short_grace: float = 0.5
    kill: float = 1.0


@dataclass(frozen=True)
class Say:
    """Print a line of launch.py's own."""

    text: str


@dataclass(frozen=True)
class Tell:
    """Let the job know which of its processes failed."""

    task: Task
    how: str


@dataclass(frozen=True)
class Kill:
    """Send a signal to every process of the job."""

    signum: int


Action = Say | Tell | Kill

# How a process has failed that only says that another has.
UNNAMED = "ended because the job had failed"


class Ending:
    """Follows one job to its end.

    Report every exit to `exited` and every signal to `signalled`, call `tick` after that and whenever `deadline` has
    passed, and do what they return.
    """

    def __init__(self, tasks: Sequence[Task], limits: EndingLimits | None = None) -> None:
        self.phase = Phase.RUNNING
        self.deadline: float | None = None
        self.exit_code = 0
        self._limits = limits or EndingLimits()
        self._tasks = tasks
        self._running = set(range(len(tasks)))
        self._early: int | None = None  # the first server to leave while scheduler and workers ran
        self._told: int | None = None  # the first process to say that another has failed

    @property
    def over(self) -> bool:
        """Nothing of the job is left."""
        return self.phase is Phase.OVER

    @property
    def all_exited(self) -> bool:
        """Every process that was started has exited; what those have started may still be there."""
        return not self._running

    def exited(self, index: int, how: Exit, now: float) -> list[Action]:
        """The process of `tasks[index]` has ended."""
        self._running.discard(index)
        if self.phase not in (Phase.RUNNING, Phase.LINGER):
            return []
        if how.code == JOB_FAILED_EXIT and self._tasks[index].role != "worker":
            if self._told is None:
                self._told, self.deadline = index, now + self._limits.blame
            return [] if self._left("worker") else self._fail_unnamed(self._told, now)
        if how.status != 0:
            return self._fail(index, str(how), how.status, now)
        if self.phase is Phase.LINGER:
            return []
        if not self._left("worker"):
            if self._told is not None:
                return self._fail_unnamed(self._told, now)
            self._enter(Phase.LINGER, now + self._limits.linger)
        elif self._told is not None:
            return []  # whoever has failed has its time still
        elif not self._left("scheduler"):
            self._early = self.deadline = None
        elif self._tasks[index].role == "server" and self._early is None:
            self._early = index
            self.deadline = now + self._limits.patience
        return []

    def signalled(self, signum: int, now: float) -> list[Action]:
        """launch.py has received a signal that asks it to end."""
        if self.phase in (Phase.RUNNING, Phase.LINGER):
            self.exit_code = 128 + signum
        elif self.phase in (Phase.TERMINATING, Phase.KILLING, Phase.OVER):
            # Somebody is in a hurry. Service managers repeat SIGTERM without being so.
            return self._kill(now) if signum == signal.SIGINT and self.phase is Phase.TERMINATING else []
        return self._terminate(now, self._limits.grace)

    def tick(self, now: float, leftovers: Callable[[], bool]) -> list[Action]:
        """Time has passed.

        Args:
            now: the time.
            leftovers: whether processes of the job are there besides those that were started; asked only when those
                have all exited.
        """
        if self.over:
            return []
        if self.all_exited:
            if not leftovers():
                self._enter(Phase.OVER, None)
                return []
            if self.phase not in (Phase.TERMINATING, Phase.KILLING):
                return self._terminate(now, self._grace())
        if self.phase is Phase.WINDOW and not self._left("worker"):
            return self._terminate(now, self._limits.grace)
        if self.deadline is None or now < self.deadline:
            return []
        return self._expired(now)

    def _expired(self, now: float) -> list[Action]:
        if self.phase is Phase.RUNNING and self._told is not None:
            return self._fail_unnamed(self._told, now)
        if self.phase is Phase.RUNNING and self._early is not None:
            return self._fail(self._early, "exited with code 0 while workers were running", 1, now)
        if self.phase is Phase.TERMINATING:
            return self._kill(now)
        if self.phase is Phase.KILLING:
            names = ", ".join(self._tasks[index].name for index in sorted(self._running)) or "a process they started"
            self._enter(Phase.OVER, None)
            return [Say(f"gave up waiting for {names} to die after SIGKILL")]
        return self._terminate(now, self._grace())

    def _fail(self, index: int, how: str, code: int, now: float) -> list[Action]:
        self.exit_code = code
        self._enter(Phase.WINDOW, now + self._limits.window)
        task = self._tasks[index]
        return [Say(f"{task.title} {how}"), Tell(task, how)]

    def _fail_unnamed(self, told: int, now: float) -> list[Action]:
        """Nobody has exited as if it had failed, but the job has: its processes have said why."""
        return self._fail(told, UNNAMED, 1, now)

    def _terminate(self, now: float, grace: float) -> list[Action]:
        self._enter(Phase.TERMINATING, now + grace)
        return [Kill(signal.SIGTERM)]

    def _kill(self, now: float) -> list[Action]:
        self._enter(Phase.KILLING, now + self._limits.kill)
        return [Kill(signal.SIGKILL)]

    def _grace(self) -> float:
        return self._limits.grace if self.exit_code else self._limits.short_grace

    def _enter(self, phase: Phase, deadline: float | None) -> None:
        self.phase, self.deadline = phase, deadline

    def _left(self, *roles: str) -> bool:
        return any(self._tasks[index].role in roles for index in self._running)
