"""The interface between a supervisor and the crews that run a job's tasks, and how both wait.

A crew runs some of a job's tasks: as children of this process (`processes.children`), through agents on other hosts
(`agents.fleet`), or as pods (`kinds.pods.crew`). It reports their output and exits to its sink.
"""

from __future__ import annotations

import selectors
from collections.abc import Mapping
from typing import Protocol

from kvstore.job.exit_report import ExitReport
from kvstore.job.processes import Exit


def turn(selector: selectors.BaseSelector, seconds: float) -> bool:
    """Wait until something is ready, for so many seconds at most, and call the callables of what is ready.

    Returns:
        Whether anything was ready.
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

    def restart(self, index: int, variables: Mapping[str, str]) -> None:
        """Start a task that has exited again, if `can_restart`. If that fails, it has exited again.

        Args:
            variables: what its environment has beside, or instead of, what it had.
        """

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
