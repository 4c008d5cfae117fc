"""A progress bar, on a terminal with rich installed."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any, Protocol

from workers.callbacks.param import BatchEndParam

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


class Counting(Protocol):
    """What the bar needs of a run of ``fit``."""

    @property
    def num_batches(self) -> int | None:
        """The number of batches in an epoch of this worker; None if unknown."""


class ProgressBar:
    """Shows the progress of the epoch; a ``batch_end_callback``. Log lines on standard error appear above the bar.

    It shows nothing if standard error is not a terminal or rich is missing. (MXNet's bar fills log files.)

    Args:
        total: the number of batches in an epoch; None for what the training data says, if it does.
        length: the width of the bar, in characters.
    """

    def __init__(self, total: int | None = None, length: int = 80) -> None:
        self.total, self.length = total, length
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._redirected: list[logging.StreamHandler[Any]] = []

    def begin(self, run: Counting) -> None:
        """Take the number of batches from ``run``."""
        if self.total is None:
            self.total = run.num_batches

    def __call__(self, param: BatchEndParam) -> None:
        """Count a batch."""
        if self._progress is None:
            console = _terminal()
            if console is None:
                return
            self._start(console)
        if self._progress is not None and self._task is not None:
            done, title = param.nbatch + 1, f"Epoch {param.epoch}"
            self._progress.update(self._task, completed=done, total=self.total, description=title)

    def end(self) -> None:
        """Remove the bar."""
        if self._progress is None:
            return
        self._progress.stop()
        for handler in self._redirected:
            handler.setStream(sys.stderr)
        self._progress, self._redirected = None, []

    def _start(self, console: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(self.length), MofNCompleteColumn())
        self._progress = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
        handlers = [handler for handler in logging.getLogger().handlers if type(handler) is logging.StreamHandler]
        self._redirected = [handler for handler in handlers if handler.stream is sys.stderr]
        self._progress.start()  # rich replaces sys.stderr by a stream that prints above the bar
        for handler in self._redirected:
            handler.setStream(sys.stderr)
        self._task = self._progress.add_task("", total=self.total)


def _terminal() -> Console | None:
    if not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(stderr=True)
