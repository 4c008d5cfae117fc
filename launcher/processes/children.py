"""The crew of a local job, and of an agent: tasks as children of this process."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum, auto
from functools import partial

from kvstore.job.exit_report import ReportFile
from kvstore.job.forking import FORK_SERVER, Forked, ForkServer
from kvstore.job.processes import Exit
from kvstore.job.settings import REPLICAS
from launcher.errors import LaunchError
from launcher.job.description import Job, OutputOptions
from launcher.job.tasks import Task, forkable
from launcher.processes.child import Child, OutputPipe
from launcher.processes.guard import Guard
from launcher.supervision.crew import Crew, Sink


class Share(Enum):
    """What a task has of the standard streams of this process."""

    INPUT = auto()
    ALL = auto()


def shared(job: Job, foreground: bool, terminal: bool) -> tuple[int, Share] | None:
    """Return which worker has what of the standard streams of launch.py; None if none has anything. Pure.

    The single worker of a job has them as without launch.py, unless an option says where its lines go. `foreground`:
    whether launch.py itself may read its standard input. `terminal`: whether all three are terminals.
    """
    if job.cluster.attach is not None:
        return job.cluster.attach, Share.ALL
    if job.num_workers > 1 or not foreground:
        return None
    return 0, Share.ALL if terminal and job.output == OutputOptions() else Share.INPUT


class Children(Crew):
    """Runs tasks on this machine.

    Args:
        tasks: the tasks by index, in the order in which to start them.
        guard: signals them, and kills them if this process dies.
        pass_fds: the file descriptors that a task inherits, by index.
        shares: what of this process's standard streams a task has, by index; nothing if it is not there.
        worker: makes the task of one more worker, of this rank; None if none is added here.
    """

    def __init__(
        self,
        tasks: Mapping[int, Task],
        guard: Guard,
        *,
        pass_fds: Mapping[int, tuple[int, ...]] | None = None,
        shares: Mapping[int, Share] | None = None,
        worker: Callable[[int], Task] | None = None,
    ) -> None:
        self._tasks = dict(tasks)
        self._guard = guard
        self._pass_fds = pass_fds or {}
        self._shares = shares or {}
        self._worker = worker
        self._children: dict[int, Child] = {}
        # Those that were started again. They are not reaped before the end: no other process may get their pids.
        self._former: list[Child] = []
        self._pipes: dict[int, list[OutputPipe]] = {}
        self._reading = True
        self._forkable: frozenset[int] = frozenset()
        self._forks: ForkServer | None = None
        # Whether what it makes is started again when it dies. If not, the fork server ends when it has made all.
        self._may_return = False

    def start(self, selector: selectors.BaseSelector, sink: Sink) -> None:
        self._selector, self._sink = selector, sink
        self._forkable, env = forkable(self._tasks)
        for index in self._tasks:
            self._make(index, index in self._forkable)
        if self._forkable:
            self._start_forks(env)
        # All exist before any executes: if the tenth cannot be made, no program has done anything yet.
        for child in self._children.values():
            child.execute(self._forks)

    def _start_forks(self, env: Mapping[str, str]) -> None:
        first = next(self._children[index] for index in self._tasks if index in self._forkable)
        with suppress(OSError):  # an interpreter for each task is tried then, and its error is shown
            forks = ForkServer(FORK_SERVER, env, self._guard.fileno(), stderr=first.ends[1])
            forks.execute()
            self._forks, self._may_return = forks, REPLICAS.read(env) > 0
            self._selector.register(self._forks, selectors.EVENT_READ, self._begin)

    def _end_forks(self) -> None:
        if self._forks is not None:
            with suppress(KeyError):
                self._selector.unregister(self._forks)
            self._note(self._forks.close())
            self._forks = None

    def _begin(self) -> None:
        """Note what the fork server has made. Start an interpreter for what it does not make."""
        assert self._forks is not None  # noqa: S101 (for the type checker)
        self._note(self._forks.collect())
        if self._forks.ended or not (self._forks.asked or self._may_return):
            never = self._forks.asked
            self._end_forks()
            for index, child in self._of(never):
                if child.cancelled:
                    continue
                try:
                    child.execute()
                except LaunchError as error:
                    self._sink.say(str(error))
                    if not child.pid:
                        child.exit = Exit(1, text="could not be started")
                        self._sink.exited(index, child.exit)
                if child.pid:
                    self._exists(child)

    def _note(self, made: Sequence[Forked]) -> None:
        for _, child in self._of(made):
            child.begin()
            self._exists(child)

    def _of(self, made: Sequence[Forked]) -> list[tuple[int, Child]]:
        return [(index, child) for index, child in self._children.items() if any(map(child.is_made_of, made))]

    def _exists(self, child: Child) -> None:
        self._guard.add(child.pid)

    def _make(self, index: int, forked: bool) -> Child:
        report = self._guard.directory / _report_name(index)
        share = self._shares.get(index)
        child = Child(
            self._tasks[index],
            self._guard.fileno(),
            self._pass_fds.get(index, ()),
            stdin=0 if share is Share.INPUT else None,
            attached=share is Share.ALL,
            report=report,
            forked=forked,
        )
        if not forked:
            self._exists(child)
        self._children[index] = child
        self._pipes[index] = [
            OutputPipe(source, partial(self._sink.output, index, number)) for number, source in child.pipes.items()
        ]
        if self._reading:
            for pipe in self._pipes[index]:
                pipe.register(self._selector)
        return child

    def can_restart(self, index: int) -> bool:
        return index in self._tasks

    def more(self, index: int, rank: int, host: str = "") -> Task | None:
        return None if self._worker is None else self._worker(rank)

    def take(self, index: int, task: Task) -> None:
        """Start a task that is new, or has run elsewhere until now."""
        self._tasks[index] = task
        if index in self._children:  # it has run here before that
            self.restart(index, {})
            return
        try:
            self._make(index, forked=False).execute()
        except LaunchError as error:
            self._sink.say(str(error))
            if index not in self._children:
                self._sink.exited(index, Exit(1, text="could not be started"))

    def restart(self, index: int, variables: Mapping[str, str], host: str = "") -> None:
        for pipe in self._pipes[index]:
            pipe.finish()
        with suppress(OSError):  # or why it has ended would pass for why the next one ends
            ReportFile(self._guard.directory / _report_name(index), 0, 0).clear()
        task, former = self._tasks[index], self._children[index]
        self._tasks[index] = replace(task, env={**task.env, **variables})
        try:
            self._make(index, index in self._forkable and self._forks is not None).execute(self._forks)
        except LaunchError as error:
            self._sink.say(str(error))
        if self._children[index] is not former:
            self._former.append(former)
        else:
            self._sink.exited(index, Exit(1, text="could not be started again"))

    def collect(self) -> None:
        if (note := self._guard.recheck()) is not None:
            self._sink.say(note)
        written = self._written()
        for index, child in list(self._children.items()):
            if child.exit is not None:
                continue
            how = child.poll()  # before its report is looked for: it is written before the exit, so none is missed
            if how is not None:
                for pipe in self._pipes[index]:
                    pipe.drain()  # all of its output is reported before its exit
            if (how is not None or _report_name(index) in written) and (report := child.report()) is not None:
                self._sink.reported(index, report)
            if how is not None:
                self._sink.exited(index, how)
        if all(child.exit is not None for child in self._children.values()):
            self._end_forks()  # or it would count as a process that a task has left

    def reading(self, wanted: bool) -> None:
        if wanted == self._reading:
            return
        self._reading = wanted
        for pipe in (pipe for pair in self._pipes.values() for pipe in pair):
            if wanted:
                pipe.register(self._selector)
            else:
                pipe.unregister()

    def signal(self, signum: int) -> None:
        for child in self._children.values():
            child.cancel(signum)
        self._guard.signal(signum)

    def signal_task(self, index: int, signum: int) -> bool:
        child = self._children.get(index)
        if child is None or child.exit is not None:
            return False
        child.signal(signum)
        return True

    def leftovers(self) -> bool:
        return self._guard.leftovers()

    def close(self) -> None:
        # Kill, reap, then read: once a process is reaped, its pid is free for others, so nothing is signalled then.
        # A process that was killed while it wrote has left its last lines in the pipe.
        self._end_forks()
        self._guard.kill()
        for former in self._former:
            former.reap()
        for index, child in self._children.items():
            child.reap()
            for pipe in self._pipes[index]:
                pipe.drain()
                pipe.finish()
        self._children, self._former = {}, []

    def _written(self) -> set[str]:
        """The names of the files in the job's directory, listed once for all tasks: there may be thousands."""
        with suppress(OSError):
            return {path.name for path in self._guard.directory.iterdir()}
        return set()


def _report_name(index: int) -> str:
    return f"report-{index}"
