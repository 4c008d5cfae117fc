"""Where the lines of a job's processes go: to the terminal, or what is in its place, and into log files."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvstore.job.exit_report import ExitReport
from kvstore.job.processes import Exit
from kvstore.job.settings import COLUMNS, NO_COLOR
from launcher.job.description import OutputOptions
from launcher.job.tasks import Task
from launcher.output.lines import Prefixer, StatusPrefixer, prefix
from launcher.output.log_files import STREAMS, LogFiles, LogLines, remark, said, stamp
from launcher.output.outlet import Outlet, columns, is_terminal, wants_color

OWN_FILE = "launch"  # for the lines of launch.py itself
_LONGEST = 300  # characters of a task's last line
_REMEMBERED = 20  # lines of a process that are not shown, for the case that it fails
_REMEMBERED_LINE = 2000  # bytes of each of them
_UNENDED_S = 1.0  # after which the beginning of a line is written into its file, without the end


class Display:
    """Shows the lines of one job's processes, and those of whoever runs the job.

    Args:
        name: the prefix of the caller's own lines.
        attached: the task that has the terminal, where nothing is drawn then; None for none.
        clock, monotonic: the time since the epoch; and a clock that nobody sets, for how long something has lasted.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        outlet: Outlet,
        *,
        environ: Mapping[str, str],
        options: OutputOptions,
        name: str,
        attached: int | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tasks = tasks
        self._outlet = outlet
        self._name = name
        self._attached = attached
        self._clock, self._now = clock, monotonic
        self._color = {fd: wants_color(fd, environ) for fd in (outlet.stdout, outlet.stderr)}
        self._terminal = {fd: is_terminal(fd, environ) for fd in self._color}
        self._hidden = {index for index, task in enumerate(tasks) if not options.shows(task.role, task.rank)}
        self._shows = options.shows
        self._lines: dict[tuple[int, int], Prefixer] = {}
        self._last: dict[int, bytes] = {}  # the last lines that each task has written to standard error
        self._unshown: dict[int, deque[bytes]] = {}  # the last lines of tasks that are hidden
        self._files: LogFiles | None = None
        self._entries: dict[tuple[int, int], LogLines] = {}
        self._flushed_at = 0.0
        if options.log_dir is not None:
            self._files = LogFiles(Path(options.log_dir), options.log_size, options.log_files)

    def output(self, index: int, number: int, data: bytes) -> None:
        if self._files is not None:
            self._log(index, number, data)
        target = self._outlet.stdout if number == 1 else self._outlet.stderr
        lines = self._lines.get((index, number))
        if lines is None:
            kind = StatusPrefixer if self._terminal[target] else Prefixer
            lines = kind(prefix(self._tasks[index].name, index, self._color[target]))
            self._lines[index, number] = lines
        whole = lines.feed(data) if data else lines.finish()
        status = lines.status if isinstance(lines, StatusPrefixer) else b""
        if index in self._hidden:
            self._remember(index, whole)
            return
        if whole and number == 2:
            self._last[index] = whole
        self._outlet.put(target, whole)
        if self._attached is None:  # else a bar would be drawn where somebody types
            self._outlet.show(target, (index, number), status)

    def say(self, text: str, *, secret: bool = False) -> None:
        """Show a line of the caller's own. One that holds a secret is written into no file."""
        self._outlet.put(self._outlet.stderr, f"{self._name}: {text}\n".encode(errors="surrogateescape"))
        if self._files is not None and not secret:
            at = stamp(self._clock())
            self._files.write(OWN_FILE, said(text, at), at)
            if problem := self._files.problem():
                self.say(problem)

    def show(self, index: int, text: str) -> None:
        target = self._outlet.stderr
        own = prefix(self._tasks[index].name, index, self._color[target])
        self._outlet.put(target, own + text.encode(errors="surrogateescape") + b"\n")

    def show_hidden(self, index: int) -> bool:
        """Show the last lines of a task that has failed, if they have not been shown. Return whether there were any."""
        remembered = self._unshown.pop(index, None)
        if not remembered:
            return False
        count = f"{len(remembered)} lines" if len(remembered) > 1 else "line"
        self.say(f"the last {count} of {self._tasks[index].title}, which had not been shown:")
        self._outlet.put(self._outlet.stderr, b"".join(remembered))
        return True

    def last_line(self, index: int) -> str:
        line = self._without_prefix(index, self._outlet.stderr, b"".join(_tail(self._last.get(index, b""), 1)))
        return line[:_LONGEST].decode(errors="replace").strip()

    def begins(self, index: int, start: int = 1, why: str = "") -> None:
        """A task is started. `start`: which start of it this is. `why`: why it is started again."""
        if not self._shows(self._tasks[index].role, self._tasks[index].rank):
            self._hidden.add(index)
        again = f", because it {why}" if why else ""
        where = "; what it prints is on the terminal alone" if index == self._attached else ""
        self._note(index, f"start {start} of {self._tasks[index].title}{again}{where}")

    def reported(self, index: int, report: ExitReport) -> None:
        if self._files is not None and not report.printed:
            at = stamp(self._clock())
            self._write(index, said(report.details.rstrip() or report.error, at), at)

    def exited(self, index: int, how: Exit) -> None:
        self._note(index, str(how))

    def tick(self) -> None:
        now = self._now()
        if self._files is None or now < self._flushed_at + _UNENDED_S:
            return
        self._flushed_at = now
        at = stamp(self._clock())
        for (index, _), entries in self._entries.items():
            if entries.holds:
                self._write(index, entries.flush(at), at)

    def conclude(self) -> None:
        if self._files is not None and (missing := self._files.missing):
            self.say(f"{missing} lines could not be written, and are missing in {self._files.directory}")

    def close(self) -> None:
        if self._files is not None:
            self._files.close()
            self._files = None

    def _without_prefix(self, index: int, target: int, line: bytes) -> bytes:
        return line.removeprefix(prefix(self._tasks[index].name, index, self._color[target]))

    def _remember(self, index: int, lines: bytes) -> None:
        if not lines:
            return
        remembered = self._unshown.setdefault(index, deque(maxlen=_REMEMBERED))
        for line in _tail(lines, _REMEMBERED):
            remembered.append(line[:_REMEMBERED_LINE] + b"\n")

    def _log(self, index: int, number: int, data: bytes) -> None:
        entries = self._entries.get((index, number))
        if entries is None:
            entries = self._entries[index, number] = LogLines(STREAMS[number])
        at = stamp(self._clock())
        self._write(index, entries.feed(data, at) if data else entries.finish(at), at)

    def _note(self, index: int, text: str) -> None:
        """Write a line of the caller's own into the file of a task."""
        if self._files is not None:
            at = stamp(self._clock())
            self._write(index, remark(text, at), at)

    def _write(self, index: int, entries: bytes, at: str) -> None:
        assert self._files is not None  # noqa: S101 (for the type checker)
        self._files.write(self._tasks[index].name.replace(" ", "-"), entries, at)
        if problem := self._files.problem():
            self.say(problem)


def _tail(lines: bytes, count: int) -> list[bytes]:
    """The last lines, so many at most, without their newlines."""
    return lines.rsplit(b"\n", count + 1)[-count - 1 : -1]


def prepare(options: OutputOptions) -> None:
    """Check that a job can have this output, before anything is started that might wait for hours."""
    if options.log_dir is not None:
        LogFiles(Path(options.log_dir), options.log_size, options.log_files).close()


def of_terminal(outlet: Outlet, environ: Mapping[str, str], options: OutputOptions) -> dict[str, str]:
    """What workers are told of the terminal: how wide a progress bar may be, 0 for none, and whether to use colors."""
    width = columns(outlet.stderr, environ) if options.shows("worker", 0) else 0  # it is worker 0's bar
    refused = {NO_COLOR.name: environ[NO_COLOR.name]} if environ.get(NO_COLOR.name) else {}
    return {COLUMNS.name: str(width), **refused}
