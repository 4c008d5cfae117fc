"""When a job ends, and how. No I/O: exits, signals and the time go in, actions come out.

    RUNNING ──a process fails──────────────► WINDOW ──1.5 s, or no worker left──┐
       │                                                                       ▼
       ├──all workers have exited 0────────► LINGER ──1 s──────────────► TERMINATING ──grace──► KILLING
       │                                                                       ▲
       └──a signal to launch.py────────────────────────────────────────────────┘

WINDOW: the survivors have time to raise an error that names the failed process, and to print it.
LINGER: the others have seen the last worker leave, and have time to exit by themselves.
TERMINATING: all processes have been sent SIGTERM. KILLING: all have been sent SIGKILL.

From each of these phases the job is OVER when all of its processes have exited, including those that its processes have
started. The first failure decides the exit code. A process that launch.py has ended has not failed.

The scheduler exits with 0 when every worker has left the job. It then tells servers and aggregators to exit. Workers
may go on after that: they have closed their stores, or they need time to exit, which with torch is seconds on a busy
machine. A server or aggregator that exits with 0 while the scheduler and workers run was not told to, and has failed. A
process of ours that exits with JOB_FAILED_EXIT reports that another process has failed. That process has time to exit,
and gets the blame.

With --min-workers, a worker that dies has not failed as long as so many are left, and neither has an aggregator. It is
reported to the scheduler.

In a job with standbys, a server that dies has not failed. It is reported to the scheduler, and started again as
`Restarts` says. If the job fails because of it, the reports of the processes that end name it, and it gets the blame.
They name the process, which is one start of a member: an earlier start of the same server may have died without harm.
A server that is moved exits with 0, and is started again at once.
A server that exits with REPLACED_EXIT was given up and has come back. The job goes on without it, so its end is never
the job's. Once no worker needs servers any more, one that dies is nothing.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.errors import JOB_FAILED_EXIT, REPLACED_EXIT
from kvstore.job.contract import process_name
from kvstore.job.exit_report import ExitReport
from kvstore.job.processes import Exit
from launcher.job.tasks import Task
from launcher.supervision.restarts import Fate, Restarts


@dataclass(frozen=True)
class Say:
    """Print a line to the user."""

    text: str


@dataclass(frozen=True)
class Tell:
    """Report a failed process to the scheduler. `how`: what happened to it."""

    index: int
    how: str


@dataclass(frozen=True)
class Lose:
    """Report a process that has died to the scheduler. The job goes on."""

    index: int
    how: str  # what happened to it
    start: int  # which start of it this was
    final: bool  # whether it is not started again


@dataclass(frozen=True)
class Restart:
    """Start a process again. `start`: which start of it this is. `before`: how the one before has ended."""

    index: int
    start: int
    before: Exit
    since: float


@dataclass(frozen=True)
class Kill:
    """Send a signal to every process of the job."""

    signum: int


Action = Say | Tell | Lose | Restart | Kill


class Phase(enum.Enum):
    """The phases of a job, which the top of this file describes."""

    RUNNING = "running"
    WINDOW = "window"
    LINGER = "linger"
    TERMINATING = "terminating"
    KILLING = "killing"
    OVER = "over"


@dataclass(frozen=True)
class EndingLimits:
    """How long each phase may last, in seconds. Once the failed process is known, any path takes less than 5 s.

    Args:
        patience: for the scheduler to exit after a server or aggregator that has exited with 0 before the workers.
        blame: for the failed process to exit after a server, an aggregator or the scheduler has reported a failure. An
            interpreter that has loaded torch takes seconds to exit on a busy machine.
    """

    window: float = 1.5  # for the survivors of a failure to report it
    linger: float = 1.0  # for the servers, the aggregators and the scheduler to exit after the last worker
    patience: float = 3.0
    blame: float = 10.0
    grace: float = 2.0  # between SIGTERM and SIGKILL, after a failure or a signal
    short_grace: float = 0.5  # the same if all workers have exited with 0
    kill: float = 1.0  # for the kernel to end a process after SIGKILL


@dataclass(frozen=True)
class Interruption:
    """A signal to launch.py has ended the job. `ended`: the indices of the tasks that ran."""

    signum: int
    ended: tuple[int, ...]


# What is said of a process that has exited with JOB_FAILED_EXIT if no other has failed visibly.
UNNAMED = "ended because the job had failed"


class _Death(NamedTuple):
    """Which task's process has died, how, and when."""

    task: int
    how: Exit
    at: float


class Ending:
    """The state machine of one job's end.

    The caller reports exits to `exited` and signals to `signalled`, calls `tick` afterwards and when `wake` has passed,
    and performs the actions that these return.

    Attributes:
        phase: where the job is.
        deadline: when the phase ends; None for no deadline.
        exit_code: launch.py's.
        failure: the first process to fail, and how; None if none has.
        interruption: the signal that has ended the job; None if none has.
        finished: whether the scheduler has seen all workers leave.
    """

    def __init__(
        self, tasks: Sequence[Task], limits: EndingLimits | None = None, restarts: Restarts | None = None
    ) -> None:
        self.phase = Phase.RUNNING
        self.deadline: float | None = None
        self.exit_code = 0
        self.failure: Tell | None = None
        self.interruption: Interruption | None = None
        self._limits = limits or EndingLimits()
        self._tasks = tasks
        self._running = set(range(len(tasks)))
        self._early: int | None = None  # the first but workers that has exited while these ran
        self._told: int | None = None  # the first process that has reported the failure of another
        self._restarts = Restarts(tasks, frozenset(), 0) if restarts is None else restarts
        self.finished = self._began = False
        self._deaths: dict[str, _Death] = {}  # that were none of the job's, by the name of the process
        self._waiting: dict[int, float] = {}  # tasks that are to be started again, and when
        self._consequences: dict[int, ExitReport] = {}  # of processes that end because of another
        # Processes that nobody waits for, nor for those after them, as the scheduler has said at its end.
        self._given_up: frozenset[str] = frozenset()
        self.moving: int | None = None  # the task whose process is to end in order, and to be started again

    @property
    def over(self) -> bool:
        return self.phase is Phase.OVER

    @property
    def all_exited(self) -> bool:
        """Whether all tasks have exited. Processes that they have started may be alive."""
        return not self._running

    @property
    def wake(self) -> float | None:
        """When to call `tick`; None for no such time."""
        return min(filter(None, [self.deadline, *self._waiting.values()]), default=None)

    def reported(self, index: int, report: ExitReport) -> None:
        if report.consequence:
            self._consequences[index] = report
        if report.given_up:
            self._given_up = frozenset(report.given_up.split(", "))

    # What an exit means in RUNNING and LINGER. In later phases the outcome is decided, and an exit changes nothing.
    # "May die" is `Restarts.survivable`: servers and standbys with --replicas 1, the scheduler with --restarts.
    #
    #     process     exit code         may die                            may not die
    #     worker      0                 -                                  LINGER after the last one
    #                 another           lost, if `Restarts.spares` it      fails the job
    #     scheduler   0                 `finished`: servers need not be restarted, and may exit. LINGER if only workers
    #                                   run that it has given up
    #                 JOB_FAILED_EXIT   `_told`: another process has failed, and gets `blame` seconds to exit
    #                 another           lost, and started again            fails the job
    #     server,     0                 fine once the scheduler or all workers have exited; else `_early`: after
    #     standby,                      `patience` it is lost              after `patience` it fails the job
    #     aggregator  JOB_FAILED_EXIT   `_told`, as for the scheduler; an aggregator that was given up is lost
    #                 REPLACED_EXIT     lost, and started again            fails the job
    #                 another           lost, and started again; nothing   fails the job; an aggregator is lost
    #                                   if no worker needs it any more     if `Restarts.spares` it
    #
    # RUNNING has one deadline for two waits. Being told is later and knows more, so it replaces the other.
    #
    #     _early    _told     deadline    at the deadline
    #     None      None      None        -
    #     a task    None      patience    that task is lost, or fails the job: the scheduler is still there
    #     any       a task    blame       the job fails with UNNAMED: no process has exited so that it could be blamed
    #
    # A task is in `_running`, or in `_waiting` for its next start, or in neither. `_waiting` is empty outside RUNNING,
    # and once `_told`: a restart while the job fails would hide which process failed.
    def exited(self, index: int, how: Exit, now: float, possible: bool = True) -> list[Action]:
        """The process of `tasks[index]` has ended. `possible`: whether it can be started again, if that is wanted."""
        self._running.discard(index)
        if self.phase not in (Phase.RUNNING, Phase.LINGER):
            return []
        if not any(self._tasks[other].role == "worker" for other in self._running):
            # A worker that comes back finds nobody who could let it in.
            self._waiting = {other: at for other, at in self._waiting.items() if self._tasks[other].role != "worker"}
        if index == self.moving and self._told is None and not self.finished and self._left("worker"):
            self.moving = None
            if not how.signum and how.code in (0, REPLACED_EXIT):  # the latter if it had no time to leave
                self._running.add(index)
                return [Restart(index, self._restarts.begins(index, now), how, now)]
        replaced = how.code == REPLACED_EXIT and self._restarts.survivable(index)
        # Before all else: the exit that comes first is seldom the cause. A report names a process that was lost before.
        if how.status and not replaced and (death := self._culprit(index)) is not None:
            return self._fail(death.task, str(death.how), death.how.status, now)
        if how.status and self._told is None and self._died_alone(index) and self._restarts.spares(index):
            return self._spare(index, how, now, possible)
        if self._restarts.survivable(index) and self._told is None:
            # Either may be first: workers go on after `finished`, and the scheduler exits after the last worker.
            if self.finished or not self._left("worker"):
                how = Exit()  # nobody needs it any more
            elif how.status and how.code != JOB_FAILED_EXIT:
                return self._lose(index, how, now, possible)
        if self._told is not None and (replaced or self._is_another(index, how)):
            return []  # the process that is to blame still has time to exit
        if how.code == JOB_FAILED_EXIT and self._tasks[index].role != "worker":
            if self._told is None:
                self._told, self.deadline = index, now + self._limits.blame
                self._waiting.clear()
            return [] if self._left("worker") else self._fail_unnamed(self._told, now)
        if how.status != 0:
            return self._fail(index, f"{how}{self._restarts.too_few(index)}", how.status, now)
        self.finished = self.finished or self._tasks[index].role == "scheduler"
        if self.phase is Phase.LINGER:
            return []
        if not self._left("worker"):
            if self._told is not None:
                return self._fail_unnamed(self._told, now)
            self._enter(Phase.LINGER, now + self._limits.linger)
        elif self._told is not None:
            return []  # the failed process still has time to exit
        elif not self._left("scheduler"):
            self._early = self.deadline = None
        elif self._tasks[index].role != "worker" and self._early is None:
            self._early = index
            self.deadline = now + self._limits.patience
        return []

    def add(self, index: int, now: float) -> None:
        """A task has been added to `tasks`, and is started now."""
        self._running.add(index)
        self._restarts.add()
        self._restarts.begins(index, now)

    @property
    def dead_workers(self) -> list[int]:
        """The workers that have died, and are not started again."""
        return [
            index
            for index, task in enumerate(self._tasks)
            if task.role == "worker"
            and index not in self._running
            and index not in self._waiting
            and self._process(index) in self._deaths
        ]

    def revive(self, index: int, now: float) -> Restart:
        """Start one of `dead_workers` again, because somebody has ordered it."""
        self._running.add(index)
        died = self._deaths[self._process(index)]
        return Restart(index, self._restarts.begins(index, now), died.how, died.at)

    def runs(self, index: int) -> bool:
        return index in self._running

    def start(self, index: int) -> int:
        """Which start of a task its process is."""
        return self._restarts.start(index)

    def signalled(self, signum: int, now: float) -> list[Action]:
        """launch.py has received a signal that asks it to exit."""
        if self.phase in (Phase.RUNNING, Phase.LINGER):
            self.exit_code = 128 + signum
            self.interruption = Interruption(signum, tuple(sorted(self._running)))
        elif self.phase in (Phase.TERMINATING, Phase.KILLING, Phase.OVER):
            # A second Ctrl-C means now. A second SIGTERM does not: service managers repeat it.
            return self._kill(now) if signum == signal.SIGINT and self.phase is Phase.TERMINATING else []
        return self._terminate(now, self._limits.grace)

    def tick(self, now: float, leftovers: Callable[[], bool]) -> list[Action]:
        """Time has passed.

        `leftovers`: whether processes are alive that tasks have started; called only when all tasks have exited.
        """
        if self.over:
            return []
        if not self._began:
            self._began = True
            for index in self._running:
                self._restarts.begins(index, now)
        if self.all_exited:
            # Exits are not enough: a worker's data loaders may live on, hold its GPU, and write to the terminal.
            if not leftovers():
                self._enter(Phase.OVER, None)
                return []
            if self.phase not in (Phase.TERMINATING, Phase.KILLING):
                return self._terminate(now, self._grace())
        if self.phase is Phase.WINDOW and not self._left("worker"):
            return self._terminate(now, self._limits.grace)
        again = self._again(now)
        return again if self.deadline is None or now < self.deadline else [*again, *self._expired(now)]

    def _expired(self, now: float) -> list[Action]:
        if self.phase is Phase.RUNNING and self._told is not None:
            return self._fail_unnamed(self._told, now)
        if self.phase is Phase.RUNNING and self._early is not None:
            early = Exit(1, text="exited with code 0 while workers were running")
            if self._restarts.survivable(self._early):
                return self._lose(self._early, early, now)
            if self._tasks[self._early].role == "aggregator" and self._restarts.spares(self._early):
                return self._spare(self._early, early, now, False)
            return self._fail(self._early, str(early), early.status, now)
        if self.phase is Phase.TERMINATING:
            return self._kill(now)
        if self.phase is Phase.KILLING:
            names = ", ".join(self._tasks[index].name for index in sorted(self._running)) or "a process they started"
            self._enter(Phase.OVER, None)
            return [Say(f"gave up waiting for {names} to die after SIGKILL")]
        return self._terminate(now, self._grace())

    def _lose(self, index: int, how: Exit, now: float, possible: bool = True) -> list[Action]:
        """The job goes on without a process that has died, until it is started again."""
        if self._early == index:
            self._early = self.deadline = None
        self._deaths[self._process(index)] = _Death(index, how, now)
        self._consequences.pop(index, None)
        fate = self._restarts.dies(index, how, now, possible)
        if fate.at is not None:
            self._waiting[index] = fate.at
        elif self._tasks[index].role == "scheduler":
            return self._fail(index, str(how), how.status, now)
        words = " ".join(str(how).split())  # a hint has a line of its own; here one line is for each event
        lose = Lose(index, words, fate.start, fate.at is None)
        if not fate.text:  # the scheduler says so, or its successor
            return [lose]
        return [lose, Say(f"{self._tasks[index].title} {words}; {fate.text}")]

    def _died_alone(self, index: int) -> bool:
        """Whether a process has ended by itself, or because it was given up: not because the job fails."""
        if self.finished:
            return True  # all workers but those given up have left: one that comes back finds no scheduler any more
        report = self._consequences.get(index)
        return report is None or report.cause == self._process(index)

    def _spare(self, index: int, how: Exit, now: float, possible: bool) -> list[Action]:
        """The job goes on without a process that has died; the scheduler says so.

        A worker may be started again. Below the least the job waits for those that are, and fails if these are not
        enough.
        """
        if self._early == index:
            self._early = self.deadline = None
        others = self._left("worker")
        if self._tasks[index].role == "aggregator":
            fate = Fate(self._restarts.start(index), None, "")
        else:
            fate = self._restarts.dies(index, how, now, possible and others and not self.finished)
            if fate.at is not None:
                self._waiting[index] = fate.at
            if not self._restarts.enough(sum(self._tasks[other].role == "worker" for other in self._waiting)):
                return self._fail(index, f"{how}{self._restarts.too_few(index)}", how.status, now)
        self._deaths[self._process(index)] = _Death(index, how, now)
        self._consequences.pop(index, None)
        lose = Lose(index, " ".join(str(how).split()), fate.start, fate.at is None)
        if not others and self._tasks[index].role == "worker":
            self._enter(Phase.LINGER, now + self._limits.linger)
            return [lose]
        says = fate.text and self._restarts.limited
        return [lose, Say(f"{self._tasks[index].title} {lose.how}; {fate.text}")] if says else [lose]

    def _again(self, now: float) -> list[Action]:
        """Start those again whose time has come, if the job goes on."""
        due = [index for index, at in self._waiting.items() if now >= at]
        for index in due:
            del self._waiting[index]
        self._running.update(due)
        before = [self._deaths[self._process(index)] for index in due]
        return [Restart(died.task, self._restarts.begins(died.task, now), died.how, died.at) for died in before]

    def _process(self, index: int) -> str:
        """The name of the process of a task: of the one that runs, or else that has run last."""
        return process_name(self._tasks[index].role, self._tasks[index].rank, self._restarts.start(index))

    def _culprit(self, index: int) -> _Death | None:
        """The death because of which a process ends, as its report says.

        A report may not know the cause: a request was refused, or the process had not joined yet. Then the others
        know, above all the scheduler, which reports before anybody hears of a failure.
        """
        own = self._consequences.get(index)
        if own is None:
            return None
        causes = (report.cause for report in (own, *self._consequences.values()))
        return next((self._deaths[cause] for cause in causes if cause in self._deaths), None)

    def _is_another(self, index: int, how: Exit) -> bool:
        """Whether a server that ends once the job has failed is not what it has failed for, as the reports say."""
        if self._tasks[index].role not in ("server", "standby") or not self._restarts.survivable(index):
            return False
        reports = self._consequences.values()
        named = any(report.cause == self._process(index) for report in reports)
        return bool(how.status and how.code != JOB_FAILED_EXIT and reports) and not named

    def _fail(self, index: int, how: str, code: int, now: float) -> list[Action]:
        self.exit_code = code
        self._enter(Phase.WINDOW, now + self._limits.window)
        self.failure = Tell(index, how)
        return [self.failure]

    def _fail_unnamed(self, told: int, now: float) -> list[Action]:
        """The job has failed, though no process has exited so. Their output says why."""
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
        self._waiting.clear()

    def _left(self, role: str) -> bool:
        """Whether a process of ``role`` runs, or will, but for those that were given up."""
        left = [index for index in (*self._running, *self._waiting) if self._tasks[index].role == role]
        if not self._given_up:
            return bool(left)
        return any(self._given_up.isdisjoint(self._processes(index)) for index in left)

    def _processes(self, index: int) -> list[str]:
        """The processes that there have been of a task: a worker that is started too late comes after one given up."""
        task = self._tasks[index]
        return [process_name(task.role, task.rank, start) for start in range(1, self._restarts.start(index) + 1)]
