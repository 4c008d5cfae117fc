"""What becomes of an exception that nobody catches: the process's supervisor is told, or it is printed.

Only the first process to fail has something to say. The others end with ``NodeLost``, and a line is enough for each.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

from kvstore.errors import NodeLost
from kvstore.job.exit_report import ExitReport, ReportFile, hand_over, is_verbose
from kvstore.job.tracebacks import chain, described, place, shortened

_pid = -1


def install() -> None:
    """Take over ``sys.excepthook`` in this process, unless the user has set one. May be called again."""
    global _pid
    if sys.excepthook in (sys.__excepthook__, report_uncaught):
        sys.excepthook, _pid = report_uncaught, os.getpid()


def report_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report an exception that ends this process; see ``sys.excepthook``."""
    try:
        done = os.getpid() == _pid and _report(error)  # a fork is no member of the job, and prints
    except Exception:  # whatever it is, the error itself must be seen
        done = False
    if not done:
        sys.__excepthook__(kind, error, trace)


def reported(error: BaseException) -> ExitReport:
    """The report of a process that an exception ends."""
    losses = [one for one in chain(error) if isinstance(one, NodeLost)]
    cause = next((loss.cause for loss in losses if loss.cause), "")
    return ExitReport(described(error), place(error), shortened(error), bool(losses), cause=cause)


def _report(error: BaseException) -> bool:
    """Tell the supervisor, or print one line; return whether that was enough."""
    report = reported(error)
    consequence, where = report.consequence, report.place
    if hand_over(report, os.environ):
        return True
    # Ctrl-C is for all workers at once, and each is somewhere inside a call of ours: frames help nobody.
    short = consequence or isinstance(error, KeyboardInterrupt)
    if short and not is_verbose(os.environ) and ReportFile.from_env(os.environ) is None:
        line = described(error) + (f" (at {where})" if where else "")
        print(f"{line}\n", end="", file=sys.stderr, flush=True)  # one write: other processes print at the same time
        return True
    return False
