"""The crew of a job of `launcher.run`: its workers are processes of multiprocessing."""

from __future__ import annotations

import os
import selectors
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from launcher.calls.handover import Handover, WorkerStart
from launcher.job.tasks import Task
from launcher.processes.children import Children, Share
from launcher.processes.guard import Guard
from launcher.supervision.crew import Sink


class SpawnedCrew(Children):
    """Runs tasks on this machine; see `Crew`. It notices exits without SIGCHLD, which only the main thread can handle.

    Args:
        handover: the call, which workers make instead of executing their tasks.
        tasks, guard, pass_fds, shares: see `Children`.
    """

    def __init__(
        self,
        handover: Handover,
        tasks: Mapping[int, Task],
        guard: Guard,
        *,
        pass_fds: Mapping[int, tuple[int, ...]] | None = None,
        shares: Mapping[int, Share] | None = None,
    ) -> None:
        starts = {index: handover.starts[task.rank] for index, task in tasks.items() if task.role == "worker"}
        fds = dict(pass_fds or {})
        fds.update((index, start.pass_fds) for index, start in starts.items())
        tasks = {
            index: replace(task, argv=starts[index].argv) if index in starts else task for index, task in tasks.items()
        }
        super().__init__(tasks, guard, pass_fds=fds, shares=shares)
        self._handover = handover
        self._fed: list[int] = []
        self._ends: list[int] = []

    def start(self, selector: selectors.BaseSelector, sink: Sink) -> None:
        """Start them in order, and hand the call to the workers."""
        super().start(selector, sink)
        self._handover.started()
        for start in self._handover.starts:
            # Not blocking: a pipe takes 64 KiB, and a worker may never read.
            os.set_blocking(start.writer, False)
            selector.register(start.writer, selectors.EVENT_WRITE, partial(self._feed, start))
            self._fed.append(start.writer)
        for child in self._children.values():
            self._await(child.pid)

    def close(self) -> None:
        """Kill what is left."""
        super().close()
        for fd in [*self._fed, *self._ends]:
            self._selector.unregister(fd)
        for fd in self._ends:
            os.close(fd)
        self._fed, self._ends = [], []

    def _feed(self, start: WorkerStart) -> None:
        try:
            start.data = start.data[os.write(start.writer, start.data) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            start.data = b""
        if not start.data:
            self._selector.unregister(start.writer)
            self._fed.remove(start.writer)

    def _await(self, pid: int) -> None:
        if hasattr(os, "pidfd_open"):
            try:
                fd = os.pidfd_open(pid)
            except OSError:  # an old kernel: the supervisor checks regularly
                return
            self._ends.append(fd)
            self._selector.register(fd, selectors.EVENT_READ, partial(self._ended, fd))

    def _ended(self, fd: int) -> None:
        self._selector.unregister(fd)
        self._ends.remove(fd)
        os.close(fd)
        self.collect()
