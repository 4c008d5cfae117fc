"""What supervises a job and what runs its tasks, as each sees the other; and how both wait.

A crew runs some of a job's tasks: as children of this process (`processes.children`), or through agents on other hosts
(`agents.fleet`). Whoever started it is its sink, and hears what becomes of them.
"""

from __future__ import annotations

import selectors
from typing import Protocol

from launcher.supervision.exits import Exit


def turn(selector: selectors.BaseSelector, seconds: float) -> bool:
    """Wait so long for something to be ready, and call what is to be called then.

    Returns:
        Whether something was.
    """
    ready = selector.select(seconds)
    for key, _ in ready:
        if callable(key.data):
            key.data()
    return bool(ready)


class Sink(Protocol):
    """Takes what a crew has to tell. Tasks go by their index in the job."""

    def output(self, index: int, number: int, data: bytes) -> None:
        """A task has written to standard output (1) or error (2); no bytes mean that it will write there no more."""

    def exited(self, index: int, how: Exit) -> None:
        """A task has ended; its last words have come before."""

    def say(self, text: str) -> None:
        """Something that the user should know."""


class Crew(Protocol):
    """Runs tasks. What it waits for is in the selector, with a callable as the key's data, to be called when ready."""

    def start(self, selector: selectors.BaseSelector, sink: Sink) -> None:
        """Start every task.

        Raises:
            LaunchError: one cannot be started. Those before it run until `close`.
        """

    def collect(self) -> None:
        """Look after the tasks: a child may have exited, or a second have passed."""

    def reading(self, wanted: bool) -> None:
        """Whether to take what the tasks write; else they will have to wait once their pipes are full."""

    def signal(self, signum: int) -> None:
        """Send a signal to every process of the crew."""

    def leftovers(self) -> bool:
        """Whether anything lives that the crew has started, or that its tasks have."""

    def close(self) -> None:
        """Leave nothing alive, and hand over the last output. May be called again."""
