"""What a failed job says at its end: the consequences in a line each, then the root cause in full. No I/O.

Every process that ends by an error may report why (`kvstore.job.exit_report`). The first process to fail is the root
cause, unless its own report says that it ended because of another one. Reports wait here until the job is over, so that
the root cause is the last that the user reads. `overdue` returns those that have waited for too long.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.job.exit_report import ExitReport
from kvstore.job.processes import Exit
from launcher.job.tasks import Task

HOLD_S = 10.0  # for how long a process that has reported its end may run before its report is shown
_LONGEST = 300  # characters of an error in a line with other things


class Line(NamedTuple):
    """A line to print: one of a task, with its prefix, or one of the supervisor's own (None)."""

    task: int | None
    text: str


class Postmortem:
    """Gathers how the processes of a job end."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks
        self._reports: dict[int, ExitReport] = {}
        self._since: dict[int, float] = {}  # when those have reported that still run, and have not been shown
        self._shown: set[int] = set()
        self._exits: dict[int, Exit] = {}
        self._lost: set[int] = set()  # processes that had died before, without ending the job

    def reported(self, index: int, report: ExitReport, now: float) -> None:
        self._reports[index] = report
        if not report.printed:
            self._since[index] = now

    def exited(self, index: int, how: Exit) -> None:
        self._exits[index] = how
        self._since.pop(index, None)

    def lost(self, index: int, how: str) -> list[Line]:
        """What to print when a process has died, and the job goes on: why, if it has said so. That is over with it."""
        report = self._reports.get(index)
        silent = report is None or report.consequence or report.printed or index in self._shown
        lines = [] if silent else self._in_full(index, how)
        self._exits.pop(index, None)
        self._reports.pop(index, None)
        self._shown.discard(index)
        self._lost.add(index)
        return lines

    def overdue(self, now: float) -> list[Line]:
        """The reports of processes that have failed, and do not end: nobody should wait for these without a word."""
        late = [index for index, since in self._since.items() if now >= since + HOLD_S]
        for index in late:
            del self._since[index]
        causes = [index for index in late if not self._reports[index].consequence]
        if not causes and not any(not report.consequence for report in self._reports.values()):
            causes = [index for index in late if self._tasks[index].role == "scheduler"]
        lines = [line for index in causes for line in self._in_full(index, "has failed, and has not ended yet")]
        self._shown.update(causes)
        return lines

    def lines(self, failed: int, how: str, last_line: str = "") -> list[Line]:
        """What to print when a job has failed. `failed`: the first to fail. `last_line`: its last to standard error."""
        root = self.root(failed)
        if root != failed:
            how = str(self._exits[root]) if root in self._exits else "failed"
        if self._knows_only(root):
            because = "the job has failed"
        else:
            because = f"{self._tasks[root].title} {'has failed' if root in self._reports else how}"
        return [*self._others(root, because), *self._in_full(root, how, last_line), *self._why_fatal(root)]

    def _why_fatal(self, root: int) -> list[Line]:
        """Why the job has not gone on without a process that it could have lost, as the scheduler says."""
        if root not in self._lost:
            return []
        speakers = [index for index in self._reports if self._tasks[index].role == "scheduler"]
        return [line for index in speakers if index != root for line in self._in_full(index, "")]

    def leftover(self) -> list[Line]:
        return self._others(None, "")

    def root(self, failed: int) -> int:
        """The process whose failure is the cause of the others'."""
        report = self._reports.get(failed)
        if report is None:
            return failed
        if report.consequence:
            causes = [index for index, other in self._reports.items() if not other.consequence]
            speakers = [index for index in self._reports if self._tasks[index].role == "scheduler"]
            failed = next(iter([*causes, *(speakers if self._tasks[failed].role != "worker" else [])]), failed)
            report = self._reports[failed]
        # An error in a round comes to all of its workers, and names the one that has caused it.
        for index, other in self._reports.items():
            if other.error == report.error and re.search(rf"\b{self._tasks[index].name}\b", report.error):
                return index
        return failed

    def _knows_only(self, index: int) -> bool:
        """Whether a process of ours reports a failure that is not its own, such as the silence of a worker."""
        return self._tasks[index].role != "worker" and index in self._reports and self._reports[index].consequence

    def _in_full(self, index: int, how: str, last_line: str = "") -> list[Line]:
        title, report = self._tasks[index].title, self._reports.get(index)
        if report is not None and self._knows_only(index):
            return [Line(None, f"the job has failed: {report.error}")]
        if report is None:
            return [
                Line(None, f"{title} {how}" + (f"; the last that it printed: {_first(last_line)}" if last_line else ""))
            ]
        if report.details and index not in self._shown:
            return [Line(None, f"{title} {how}:"), *(Line(index, text) for text in report.details.splitlines())]
        return [Line(None, f"{title} {how}: {_first(report.error)}{_at(report)}")]

    def _others(self, root: int | None, because: str) -> list[Line]:
        """A line for each group of processes that have ended in the same way."""
        same_error = None if root is None or root not in self._reports else self._reports[root].error
        groups: dict[str, list[int]] = {}
        for index, report in sorted(self._reports.items()):
            if index == root or index in self._shown or report.printed:
                continue
            if report.consequence:
                if root is None or self._tasks[index].role != "worker":
                    continue
                what = f"ended because {because}"
            elif report.error == same_error:
                what = "failed with the same error"
            else:
                what = f"failed: {_first(report.error)}" if root is None else f"failed, too: {_first(report.error)}"
            groups.setdefault(what + _at(report), []).append(index)
        return [Line(None, f"{self._names(indices)} {what}") for what, indices in groups.items()]

    def _names(self, indices: Sequence[int]) -> str:
        if len(indices) == 1:
            return self._tasks[indices[0]].title
        ranks: dict[str, list[int]] = {}
        for index in indices:
            ranks.setdefault(self._tasks[index].role, []).append(self._tasks[index].rank)
        return ", ".join(f"{role}s {_ranges(numbers)}" for role, numbers in ranks.items())


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in order, as `0, 2 to 7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _first(error: str) -> str:
    line = error.partition("\n")[0]
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


def _at(report: ExitReport) -> str:
    return f" (at {report.place})" if report.place else ""
