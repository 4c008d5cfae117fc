"""Telling a job which of its processes has ended, so that the others can say so before they are ended too."""

from __future__ import annotations

from launcher.tasks import Task

LINGER_S = 0.3


def report(task: Task, how: str) -> None:
    """Tell the scheduler of `task`'s job that it has ended; the scheduler tells everybody.

    Args:
        task: the process that failed.
        how: in words: "exited with code 7".
    """
    if task.role == "scheduler":
        return  # nobody is left to tell; the others hear its silence
    from kvstore.config import Config
    from kvstore.transport.links import links  # only now: launch.py starts without it
    from kvstore.wire import Lost, encode

    config = Config.from_env(task.env)
    transport = links(config)()
    try:
        scheduler = transport.connect(config.root)
        transport.send(scheduler, encode(Lost(task.role, task.rank, how)))
    finally:
        transport.close(linger=LINGER_S)
