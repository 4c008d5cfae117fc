"""The interface between a supervisor and the crews that run a job's tasks, and how both wait, for signals too.

A crew runs some of a job's tasks: as children of this process (`processes.children`), through agents on other hosts
(`agents.fleet`), or as pods (`kinds.pods.crew`). It reports their output and exits to its sink.
"""

from __future__ import annotations

import selectors
import signal
import socket
from collections.abc import Mapping
from types import FrameType
from typing import Any, Protocol

from kvstore.job.exit_report import ExitReport
from kvstore.job.processes import Exit, signal_name
from launcher.job.tasks import Task


def turn(selector: selectors.BaseSelector, seconds: float) -> bool:
    """Wait until something is ready, for so many seconds at most, and call the callables of what is ready.

    Returns whether anything was ready.
    """
    ready = selector.select(seconds)
    for key, _ in ready:
        if callable(key.data):
            key.data()
    return bool(ready)


class Sink(Protocol):
    """Takes what a crew reports. A task is identified by its index in the job."""

    def output(self, index: int, number: int, data: bytes) -> None:
        """A task has written to standard output (1) or error (2). Empty data is the end of that stream."""

    def reported(self, index: int, report: ExitReport) -> None:
        """A task has said why it ends. Its exit may follow soon, later or never."""

    def exited(self, index: int, how: Exit) -> None:
        """A task has ended. All of its output, and its report, have been reported before."""

    def say(self, text: str, *, secret: bool = False) -> None:
        """Show a line to the user. One that holds a secret is written into no file."""


class Crew:
    """Runs tasks. It registers what it waits for with the selector; a key's data is the callable to call when ready.

    Here it has no tasks that are started again, read, or sent a signal, and leaves nothing behind.
    """

    def start(self, selector: selectors.BaseSelector, sink: Sink) -> None:
        """Start every task. If one cannot be started, the tasks before it run until `close`."""
        raise NotImplementedError

    def can_restart(self, index: int) -> bool:
        """Whether this crew can start this task again, once it has exited."""
        return False

    def restart(self, index: int, variables: Mapping[str, str], host: str = "") -> None:
        """Start a task that has exited again, if `can_restart`. If that fails, it has exited again.

        `variables`: what its environment has beside, or instead of, what it had. `host`: one of `hosts` where it is to
        run from now on; empty for where it ran.
        """

    def more(self, index: int, rank: int, host: str = "") -> Task | None:
        """Make a task of one more worker, which `take` starts; None if this crew cannot.

        `host`: one of `hosts`; empty for the one that has fewest workers.
        """
        return None

    def take(self, index: int, task: Task) -> None:
        """Start a task that this crew has not had."""

    def hosts(self) -> list[str]:
        """The hosts on which this crew can start tasks; none if it starts them where it is."""
        return []

    def collect(self) -> None:
        """Check on the tasks. Called when a child may have exited, and regularly."""

    def reading(self, wanted: bool) -> None:
        """Whether to read the tasks' output. While it is not read, tasks block when their pipes are full."""

    def signal(self, signum: int) -> None:
        """Send a signal to all processes of the crew."""

    def signal_task(self, index: int, signum: int) -> bool:
        """Send a signal to the processes of one task. Return whether it runs, and in this crew."""
        return False

    def leftovers(self) -> bool:
        """Whether any process is alive that the crew or one of its tasks has started."""
        return False

    def close(self) -> None:
        """Kill what is alive, and report the last output. May be called again."""
        raise NotImplementedError


# The signals that ask launch.py to exit, and the one that reports the exit of a child.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CHILD = signal.SIGCHLD


def called(signum: int) -> str:
    return "Ctrl-C" if signum == signal.SIGINT else signal_name(signum)


class SignalQueue:
    """Collects signals while it is entered. A selector finds it readable when there are any. Main thread only."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._before: dict[int, Any] = {}
        self._before_fd = -1

    def fileno(self) -> int:
        return self._read.fileno()

    def take(self) -> list[int]:
        try:
            return list(self._read.recv(4096))
        except BlockingIOError:
            return []

    def __enter__(self) -> SignalQueue:
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._before_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for signum in (*ENDING, CHILD):
            # `nohup launch.py ...` begins with SIGHUP ignored, `launch.py ... &` in a script with SIGINT ignored:
            # Ctrl-C is meant for what runs in the foreground then.
            if signum in (signal.SIGHUP, signal.SIGINT) and signal.getsignal(signum) is signal.SIG_IGN:
                continue
            self._before[signum] = signal.signal(signum, _leave_it_to_the_queue)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._before_fd)
        self._read.close()
        self._write.close()


def _leave_it_to_the_queue(signum: int, frame: FrameType | None) -> None:
    """Do nothing. Without a handler, the signal would have its default effect."""
