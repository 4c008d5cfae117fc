"""Where the lines of a job's processes go: to the terminal, or what is in its place, and into log files."""

from __future__ import annotations

import sys
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
from launcher.output.live import BESIDE, LONGEST_HOST, LiveTable, LiveView, require_rich
from launcher.output.log_files import STREAMS, LogFiles, LogLines, remark, said, stamp
from launcher.output.outlet import Outlet, columns, height, is_terminal, wants_color

DEPRECATED = (
    "--live is deprecated, and the next release has it no more: in another terminal, kvstore-status --watch shows the "
    "state of each process while the job runs, and --log-dir DIR keeps what each has printed"
)
OWN_FILE = "launch"  # for the lines of launch.py itself
_LONGEST = 300  # characters of a task's last line
_REMEMBERED = 20  # lines of a process that are not shown, for the case that it fails
_REMEMBERED_LINE = 2000  # bytes of each of them
_REDRAW_S, _REDRAW_CHANGED_S = 1.0, 0.25  # between two drawings, of the same lines and of new ones
_REST = 50  # times as long as a drawing has taken, the next one waits: a large table takes 2 % of a core
_FEWEST_ROWS, _BESIDE_ROWS = 4, 3
_FEWEST_COLUMNS = 20
_BLANK_LINES = 10  # at the end of what is written, before which the last line is looked for
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
        self._environ = environ
        self._hidden = {index for index, task in enumerate(tasks) if not options.shows(task.role, task.rank)}
        self._unscrolled: set[int] = set()  # tasks whose lines a terminal does not show
        self._live: LiveView | None = None
        self._drawn = b""
        self._drawn_at, self._redraw_s = 0.0, 0.0
        if options.live and self._terminal[outlet.stderr]:
            require_rich()
            self._table = LiveTable(self._color[outlet.stderr])
            watched = [index for index in range(len(tasks)) if index not in self._hidden or not options.show]
            self._live = LiveView(tasks, watched, self._now())
            if not options.scroll:
                self._unscrolled = {index for index, task in enumerate(tasks) if task.role == "worker"}
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
        if self._live is not None:
            self._follow(self._live, index, target, whole, status)
        if index in self._hidden or (index in self._unscrolled and self._terminal[target]):
            self._remember(index, whole)
            return
        if whole and number == 2:
            self._last[index] = whole
        self._outlet.put(target, whole)
        if self._live is None and self._attached is None:  # else a bar would be drawn where somebody types
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
        again = f", because it {why}" if why else ""
        if self._live is not None:
            self._live.begins(index, start, self._now())
        where = "; what it prints is on the terminal alone" if index == self._attached else ""
        self._note(index, f"start {start} of {self._tasks[index].title}{again}{where}")

    def reported(self, index: int, report: ExitReport) -> None:
        if self._live is not None:
            self._live.reported(index, report, self._now())
        if self._files is not None and not report.printed:
            at = stamp(self._clock())
            self._write(index, said(report.details.rstrip() or report.error, at), at)

    def exited(self, index: int, how: Exit, failed: bool) -> None:
        """A task has ended.

        `failed`: whether by a failure of its own, as far as its exit tells, and not because the job is ended.
        """
        if self._live is not None:
            self._live.exited(index, how, failed, self._now())
        self._note(index, str(how))

    def tick(self) -> None:
        now = self._now()
        if self._live is not None:
            self._redraw(self._live, now)
        if self._files is None or now < self._flushed_at + _UNENDED_S:
            return
        self._flushed_at = now
        at = stamp(self._clock())
        for (index, _), entries in self._entries.items():
            if entries.holds:
                self._write(index, entries.flush(at), at)

    def conclude(self) -> None:
        if self._live is not None and self._drawn:
            self._outlet.show(self._outlet.stderr, self, b"")
            self._outlet.put(self._outlet.stderr, self._draw(self._live, self._now()) + b"\n")
        self._live = None
        if self._files is not None and (missing := self._files.missing):
            self.say(f"{missing} lines could not be written, and are missing in {self._files.directory}")

    def close(self) -> None:
        if self._files is not None:
            self._files.close()
            self._files = None

    def _follow(self, live: LiveView, index: int, target: int, whole: bytes, status: bytes) -> None:
        now = self._now()
        lines = [self._without_prefix(index, target, line) for line in _tail(whole, _BLANK_LINES)]
        if said := next((line for line in reversed(lines) if line.strip()), b""):
            live.said(index, said, now)
        live.rewrites(index, self._without_prefix(index, target, status), now)

    def _redraw(self, live: LiveView, now: float) -> None:
        since = now - self._drawn_at
        if since < self._redraw_s or (since < _REDRAW_S and not live.changed):
            return
        try:
            self._drawn = self._draw(live, now)
        except Exception as error:  # the job matters more than how it is shown
            self._live, self._drawn, self._unscrolled = None, b"", set()
            self.say(f"--live cannot draw any more ({type(error).__name__}: {error}); lines are shown instead")
        self._outlet.show(self._outlet.stderr, self, self._drawn)
        self._drawn_at = self._now()
        self._redraw_s = max(_REDRAW_CHANGED_S, _REST * (self._drawn_at - now))

    def _draw(self, live: LiveView, now: float) -> bytes:
        """The lines to show; none if the terminal is gone."""
        fd = self._outlet.stderr
        width = columns(fd, self._environ)
        rows, rest = live.rows(now, max(_FEWEST_ROWS, height(fd) - _BESIDE_ROWS))
        return self._table.draw(rows, rest, width) if width else b""

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


def prepare(options: OutputOptions, environ: Mapping[str, str]) -> None:
    """Check that a job can have this output, before anything is started that might wait for hours."""
    if options.live:
        print(f"launch.py: warning: {DEPRECATED}", file=sys.stderr)
        if is_terminal(2, environ):
            require_rich()
    if options.log_dir is not None:
        LogFiles(Path(options.log_dir), options.log_size, options.log_files).close()


def of_terminal(outlet: Outlet, environ: Mapping[str, str], options: OutputOptions, host: str = "") -> dict[str, str]:
    """What workers are told of the terminal: how wide a progress bar may be, 0 for none, and whether to use colors.

    `host`: the host of a worker, if it is shown.
    """
    width = columns(outlet.stderr, environ)
    if options.live and width:
        width = max(_FEWEST_COLUMNS, width - BESIDE - (min(LONGEST_HOST, len(host)) + 2 if host else 0))
    elif not options.shows("worker", 0):  # whose bar it is
        width = 0
    refused = {NO_COLOR.name: environ[NO_COLOR.name]} if environ.get(NO_COLOR.name) else {}
    return {COLUMNS.name: str(width), **refused}
