"""A progress bar on a terminal, drawn by rich; lines where there is none."""

from __future__ import annotations

import io
import logging
import os
import stat
import sys
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from kvstore.job.config import Config
from workers.callbacks.param import BatchEndParam
from workers.common.run_log import log_line

if TYPE_CHECKING:
    from rich.progress import Progress

_REDRAW_S = 0.1
_LINE_S = 10.0  # between lines, where there is no bar
_AROUND = 40  # columns beside the bar itself: process, epoch, count, time


class Counting(Protocol):
    """What the bar needs of a run of ``fit``."""

    @property
    def num_batches(self) -> int | None:
        """The number of batches in an epoch of this worker; None if unknown."""


class Bar(Protocol):
    """Something that shows the progress."""

    def show(self, param: BatchEndParam, total: int | None) -> None:
        """Show how many batches of the epoch are done."""

    def end(self) -> None:
        """Remove what is shown."""


class ProgressBar:
    """Shows the progress of the epoch on rank 0; a ``batch_end_callback``. Log lines appear above the bar.

    The bar is on the terminal of the process, or on that of ``launch.py``, also if the process is on another host. rich
    draws it (``pip install rich``). Without a terminal, and without rich, a line is logged every ten seconds instead.
    (MXNet's bar fills log files.)

    Args:
        total: the number of batches in an epoch; None for what the training data says, if it does.
        length: the width of the bar, in characters, where the terminal is wide enough.
    """

    def __init__(self, total: int | None = None, length: int = 80) -> None:
        self.total, self.length = total, length
        self._bar: Bar | None = None

    def begin(self, run: Counting) -> None:
        """Take the number of batches from ``run``."""
        if self.total is None:
            self.total = run.num_batches

    def __call__(self, param: BatchEndParam) -> None:
        """Count a batch."""
        if self._bar is None:
            self._bar = _choose(param.rank, self.length)
        self._bar.show(param, self.total)

    def end(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.end()
            self._bar = None


def _choose(rank: int, length: int) -> Bar:
    if rank == 0 and find_spec("rich") is not None:
        if sys.stderr.isatty():
            return TerminalBar(length)
        columns = Config.from_env().columns
        if columns and _is_pipe():
            return RelayedBar(length, columns)
    return ProgressLines()


def _is_pipe() -> bool:
    """Whether standard error is a pipe, as it is if ``launch.py`` shows it; the program may have redirected it."""
    try:
        return stat.S_ISFIFO(os.fstat(sys.stderr.fileno()).st_mode)
    except (OSError, ValueError):
        return False


class TerminalBar:
    """A bar on this process's own terminal. What the process writes to standard error appears above it.

    Args:
        length: the width of the bar, in characters.
    """

    def __init__(self, length: int) -> None:
        from rich.console import Console

        console = Console(stderr=True)
        self._progress = _progress(console, length, live=True)
        handlers = [handler for handler in logging.getLogger().handlers if type(handler) is logging.StreamHandler]
        self._redirected = [handler for handler in handlers if handler.stream is sys.stderr]
        self._progress.start()  # rich replaces sys.stderr by a stream that prints above the bar
        for handler in self._redirected:
            handler.setStream(sys.stderr)
        self._task = self._progress.add_task("")

    def show(self, param: BatchEndParam, total: int | None) -> None:
        """See ``Bar``."""
        _update(self._progress, self._task, param, total)

    def end(self) -> None:
        """See ``Bar``."""
        self._progress.stop()
        for handler in self._redirected:
            handler.setStream(sys.stderr)


class RelayedBar:
    """A bar on the terminal of ``launch.py``, which shows what ends with a carriage return below all lines.

    Args:
        length: the width of the bar, in characters.
        columns: the width of the terminal.
    """

    def __init__(self, length: int, columns: int) -> None:
        from rich.console import Console

        self._console = Console(file=io.StringIO(), force_terminal=True, width=columns)
        self._progress = _progress(self._console, length, live=False)
        self._task = self._progress.add_task("")
        self._drawn = -_REDRAW_S

    def show(self, param: BatchEndParam, total: int | None) -> None:
        """See ``Bar``."""
        _update(self._progress, self._task, param, total)
        now = time.monotonic()
        if now - self._drawn >= _REDRAW_S or param.nbatch + 1 == total:
            self._drawn = now
            with self._console.capture() as capture:
                self._console.print(self._progress.get_renderable())
            sys.stderr.write(capture.get().strip("\n") + "\r")
            sys.stderr.flush()

    def end(self) -> None:
        """See ``Bar``."""
        sys.stderr.write(" \r")
        sys.stderr.flush()


class ProgressLines:
    """A line every ten seconds, for want of a terminal."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def show(self, param: BatchEndParam, total: int | None) -> None:
        """See ``Bar``."""
        now, done = time.monotonic(), param.nbatch + 1
        if now - self._since >= _LINE_S:
            self._since = now
            of = f" of {total} batches ({done / total:.0%})" if total else " batches"
            log_line(param.rank, "Epoch[%d] %d%s", param.epoch, done, of)

    def end(self) -> None:
        """See ``Bar``."""


def _progress(console: Any, length: int, live: bool) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = BarColumn(max(1, min(length, console.width - _AROUND)))
    columns = (TextColumn("{task.description}"), bar, MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, auto_refresh=live, transient=True)


def _update(progress: Progress, task: Any, param: BatchEndParam, total: int | None) -> None:
    progress.update(task, completed=param.nbatch + 1, total=total, description=f"Epoch {param.epoch}")
