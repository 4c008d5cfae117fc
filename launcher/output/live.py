"""The state of each process of a job, as `--live` shows it: one line for each. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.job.exit_report import ExitReport
from kvstore.job.exits import Exit
from launcher.job.tasks import Task

RUNNING, RESTARTED, ENDED, FAILED = "running", "restarted", "ended", "failed"
_FIRST = ("worker", "aggregator", "server", "standby", "scheduler")  # what is read first is above
_SILENT_S = 10.0  # after which it is shown for how long a process has written nothing


class LiveRow(NamedTuple):
    """One line.

    Args:
        task: the index of the process.
        name: of the process.
        host: where it runs, if not on this machine.
        state: one of the states above.
        lasting: for how long it has been in that state.
        silent: for how long it has written nothing, if that is long.
        text: the last line that it has written, after what there is to say of its end.
    """

    task: int
    name: str
    host: str
    state: str
    lasting: str
    silent: str
    text: bytes


@dataclass
class _Process:
    """What is known of one process."""

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
        tasks: the processes.
        shown: the indices of those that get a line in any case; others get one if they fail.
        now: the time.
    """

    def __init__(self, tasks: Sequence[Task], shown: Sequence[int], now: float) -> None:
        order = sorted(range(len(tasks)), key=lambda index: (_FIRST.index(tasks[index].role), tasks[index].rank))
        self._processes = {index: _Process(index, tasks[index].name, tasks[index].host, now, now) for index in order}
        self._shown = frozenset(shown)
        self.changed = True

    def begins(self, index: int, start: int, now: float) -> None:
        """A process is started, for the `start`th time."""
        self._enter(index, RUNNING if start == 1 else RESTARTED, "" if start == 1 else f"start {start}", now)

    def said(self, index: int, line: bytes, now: float) -> None:
        """A process has written a line."""
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
        """A process has said why it ends."""
        self._processes[index].blameless = report.consequence
        self.said(index, report.error.encode(errors="replace"), now)

    def exited(self, index: int, how: Exit, failed: bool, now: float) -> None:
        """A process has ended.

        Args:
            index: of its task.
            how: in what way.
            failed: whether by a failure of its own, as far as its exit tells, and not because the job is ended.
            now: the time.
        """
        failed = failed and not self._processes[index].blameless
        self._enter(index, FAILED if failed else ENDED, str(how) if how.status else "", now)

    def rows(self, now: float, most: int) -> tuple[list[LiveRow], str]:
        """The lines to show.

        Args:
            now: the time.
            most: how many there may be. Those that have failed, or were restarted, go first, but keep their places.

        Returns:
            The lines, and what is to be said of the processes that have none.
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
    """A time as a clock shows it: `0:07`, `12:30`, `1:02:03`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
