"""Telling a job which of its processes has ended, as a supervisor says it."""

from __future__ import annotations

from kvstore.bootstrap.report import tell
from launcher.job.tasks import Task


def report(task: Task, how: str) -> None:
    """Tell the scheduler of `task`'s job that it has ended; see `kvstore.bootstrap.report.tell`.

    Args:
        task: the process that failed.
        how: in words: "exited with code 7".
    """
    tell(task.env, task.role, task.rank, how)
