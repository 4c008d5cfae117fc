"""`--live`: the state of each process of a job, one line for each, and how rich draws these lines."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from kvstore.job.exit_report import ExitReport
from kvstore.job.processes import Exit
from launcher.errors import LaunchError
from launcher.job.tasks import Task
from launcher.output.lines import color_of

if TYPE_CHECKING:
    from rich.text import Text

RUNNING, RESTARTED, ENDED, FAILED = "running", "restarted", "ended", "failed"
_FIRST = ("worker", "aggregator", "server", "standby", "scheduler")  # what is read first is above
_SILENT_S = 10.0  # after which it is shown for how long a process has written nothing


class LiveRow(NamedTuple):
    """One line."""

    task: int  # the index of the process
    name: str
    host: str  # where it runs, if not on this machine
    state: str  # one of the states above
    lasting: str  # for how long it has been in that state
    silent: str  # for how long it has written nothing, if that is long
    text: bytes  # the last line that it has written, after what there is to say of its end


@dataclass
class _Process:
    index: int
    name: str
    host: str
    since: float
    said_at: float
    state: str = RUNNING
    how: str = ""
    blameless: bool = False
    line: bytes = b""
    status: bytes = b""


class LiveView:
    """What is shown of the processes of one job.

    Args:
        shown: the indices of those that get a line in any case; others get one if they fail.
    """

    def __init__(self, tasks: Sequence[Task], shown: Sequence[int], now: float) -> None:
        order = sorted(range(len(tasks)), key=lambda index: (_FIRST.index(tasks[index].role), tasks[index].rank))
        self._processes = {index: _Process(index, tasks[index].name, tasks[index].host, now, now) for index in order}
        self._shown = frozenset(shown)
        self.changed = True

    def begins(self, index: int, start: int, now: float) -> None:
        self._enter(index, RUNNING if start == 1 else RESTARTED, "" if start == 1 else f"start {start}", now)

    def said(self, index: int, line: bytes, now: float) -> None:
        process = self._processes[index]
        process.line, process.said_at = line, now
        self.changed = True

    def rewrites(self, index: int, status: bytes, now: float) -> None:
        """A process has rewritten its last line, such as a progress bar; nothing ends that."""
        process = self._processes[index]
        if status != process.status:
            process.status, process.said_at = status, now
            self.changed = True

    def reported(self, index: int, report: ExitReport, now: float) -> None:
        self._processes[index].blameless = report.consequence
        self.said(index, report.error.encode(errors="replace"), now)

    def exited(self, index: int, how: Exit, failed: bool, now: float) -> None:
        """A process has ended.

        `failed`: whether by a failure of its own, as far as its exit tells, and not because the job is ended.
        """
        failed = failed and not self._processes[index].blameless
        self._enter(index, FAILED if failed else ENDED, str(how) if how.status else "", now)

    def rows(self, now: float, most: int) -> tuple[list[LiveRow], str]:
        """The lines to show.

        `most`: how many there may be. Those that have failed, or were restarted, go first, but keep their places.
        Returns the lines, and what is to be said of the processes that have none.
        """
        self.changed = False
        processes = [
            process for index, process in self._processes.items() if index in self._shown or process.state == FAILED
        ]
        if len(processes) > most:
            urgent = sorted(processes, key=lambda process: process.state not in (FAILED, RESTARTED))[: most - 1]
            chosen = {process.index for process in urgent}
            left = Counter(process.state for process in processes if process.index not in chosen)
            processes = [process for process in processes if process.index in chosen]
            rest = f"and {sum(left.values())} more: {', '.join(f'{count} {state}' for state, count in left.items())}"
        else:
            rest = ""
        return [self._row(process, now) for process in processes], rest

    def _row(self, process: _Process, now: float) -> LiveRow:
        over = process.state in (ENDED, FAILED)
        silence = now - process.said_at
        text = b"; ".join(filter(None, [process.how.encode(errors="replace"), process.status or process.line]))
        return LiveRow(
            process.index,
            process.name,
            process.host,
            process.state,
            duration(now - process.since),
            "" if over or silence < _SILENT_S else duration(silence),
            text,
        )

    def _enter(self, index: int, state: str, how: str, now: float) -> None:
        process = self._processes[index]
        process.state, process.how, process.since, process.status = state, how, now, b""
        process.said_at = now
        self.changed = True


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


BESIDE = 40  # columns beside the last line of a process, about, without its host
LONGEST_HOST = 20  # columns
_STYLES: Mapping[str, str] = {ENDED: "dim", FAILED: "bold red", RESTARTED: "yellow"}
_LONGEST = 2000  # bytes of a line that are looked at
# Escape sequences but for colors, an incomplete one at the end, and other control characters.
_UNSHOWN = re.compile(r"\x1b\[[0-?]*[ -/]*[@-ln-~]|\x1b\[[0-?]*\Z|\x1b(?!\[)|[\x00-\x08\x0a-\x1a\x1c-\x1f\x7f-\x9f]")


def require_rich() -> None:
    if find_spec("rich") is None:
        raise LaunchError("--live needs rich, which is not installed: pip install 'torch-kvstore[live]'", exit_code=1)


class LiveTable:
    """Draws lines. `color`: whether the terminal has colors, and the user wants them."""

    def __init__(self, color: bool) -> None:
        self._color = color

    def draw(self, rows: Sequence[LiveRow], rest: str, width: int) -> bytes:
        """The lines of a terminal, without a newline at their end. `rest`: a line about others, or empty."""
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", width=width)
        hosts = any(row.host for row in rows)
        for title in ("process", *(["host"] if hosts else []), "state", "for", "silent"):
            table.add_column(
                title,
                no_wrap=True,
                overflow="ellipsis",
                max_width=LONGEST_HOST,
                justify="right" if title in ("for", "silent") else "left",
            )
        table.add_column("last line", no_wrap=True, overflow="ellipsis", ratio=1)
        for row in rows:
            style = _STYLES.get(row.state, "")
            name = Text(row.name, style=f"color({color_of(row.task)})")
            host = [Text(row.host)] if hosts else []
            table.add_row(name, *host, Text(row.state, style=style), row.lasting, row.silent, self._text(row.text))
        file = io.StringIO()
        console = Console(
            file=file,
            width=width,
            force_terminal=self._color,
            color_system="256" if self._color else None,
            highlight=False,
        )
        console.print(table)
        if rest:
            console.print(Text(rest, style="dim", no_wrap=True, overflow="ellipsis"))
        return b"\n".join(line.rstrip().encode() for line in file.getvalue().splitlines())

    def _text(self, line: bytes) -> Text:
        from rich.text import Text

        readable = _UNSHOWN.sub("", line[:_LONGEST].decode(errors="replace").expandtabs())
        text = Text.from_ansi(readable, no_wrap=True, overflow="ellipsis")
        return text if self._color else Text(text.plain, no_wrap=True, overflow="ellipsis")
