"""Reports a failed process to the scheduler of its job."""

from __future__ import annotations

from kvstore.bootstrap.report import tell
from launcher.job.tasks import Task


def report(task: Task, how: str) -> None:
    """Tell the scheduler of a job that a process has ended; see `kvstore.bootstrap.report.tell`.

    Args:
        task: the failed process.
        how: what happened to it: "exited with code 7".
    """
    tell(task.env, task.role, task.rank, how)
