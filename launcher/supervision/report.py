"""Reports processes that have failed, or died, to the scheduler of their job."""

from __future__ import annotations

from contextlib import suppress

from kvstore.bootstrap.report import tell
from kvstore.errors import ConfigError
from launcher.job.tasks import Task
from launcher.supervision.actions import Lose


def report(task: Task, how: str) -> None:
    """Tell the scheduler of a job that a process has ended; see `kvstore.bootstrap.report.tell`.

    Args:
        task: the failed process.
        how: what happened to it: "exited with code 7".
    """
    tell(task.env, task.role, task.rank, how)


def report_loss(task: Task, loss: Lose) -> bool:
    """Tell the scheduler of a job that goes on that a process has died.

    Args:
        task: what it has run.
        loss: how it has died.

    Returns:
        Whether the scheduler has heard it, or need not: of itself. If not, say it again later.
    """
    return task.role == "scheduler" or tell(task.env, task.role, task.rank, loss.how, loss.start, loss.final)


def prepare(task: Task) -> None:
    """Import what `report` and `report_loss` need. Imports take longer than all else that is done after a death.

    Args:
        task: any of the job. If its environment says no address, nothing is imported.
    """
    from kvstore.job.config import Config
    from kvstore.transport.choose import links

    with suppress(ConfigError):
        links(Config.from_env(task.env))
