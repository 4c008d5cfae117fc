"""The crew of a local job, and of an agent: tasks as children of this process."""

from __future__ import annotations

import os
import selectors
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from enum import Enum, auto
from functools import partial

from kvstore.job.processes import Exit
from launcher.errors import LaunchError
from launcher.job.description import Job, OutputOptions
from launcher.job.tasks import Task
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
    """

    def __init__(
        self,
        tasks: Mapping[int, Task],
        guard: Guard,
        *,
        pass_fds: Mapping[int, tuple[int, ...]] | None = None,
        shares: Mapping[int, Share] | None = None,
    ) -> None:
        self._tasks = dict(tasks)
        self._guard = guard
        self._pass_fds = pass_fds or {}
        self._shares = shares or {}
        self._children: dict[int, Child] = {}
        # Those that were started again. They are not reaped before the end: no other process may get their pids.
        self._former: list[Child] = []
        self._pipes: dict[int, list[OutputPipe]] = {}
        self._reading = True

    def start(self, selector: selectors.BaseSelector, sink: Sink) -> None:
        self._selector, self._sink = selector, sink
        for index in self._tasks:
            self._make(index)
        # All exist before any executes: if the tenth cannot be made, no program has done anything yet.
        for child in self._children.values():
            child.execute()

    def _make(self, index: int) -> Child:
        report = self._guard.directory / _report_name(index)
        share = self._shares.get(index)
        child = Child(
            self._tasks[index],
            self._guard.fileno(),
            self._pass_fds.get(index, ()),
            stdin=0 if share is Share.INPUT else None,
            attached=share is Share.ALL,
            report=report,
        )
        self._guard.add(child.pid)
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

    def restart(self, index: int, variables: Mapping[str, str]) -> None:
        for pipe in self._pipes[index]:
            pipe.finish()
        with suppress(OSError):  # or why it has ended would pass for why the next one ends
            (self._guard.directory / _report_name(index)).unlink()
        task, former = self._tasks[index], self._children[index]
        self._tasks[index] = replace(task, env={**task.env, **variables})
        try:
            self._make(index).execute()
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
        self._guard.signal(signum)

    def signal_task(self, index: int, signum: int) -> bool:
        child = self._children.get(index)
        if child is None or child.exit is not None:
            return False
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signum)
        return True

    def leftovers(self) -> bool:
        return self._guard.leftovers()

    def close(self) -> None:
        # Kill, reap, then read: once a process is reaped, its pid is free for others, so nothing is signalled then.
        # A process that was killed while it wrote has left its last lines in the pipe.
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
