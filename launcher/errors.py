"""The errors of launchers: a job that cannot be started, and a job of `launcher.run` that has failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.errors import ConfigError

USAGE = 2
CANNOT_EXECUTE = 126
NOT_FOUND = 127


class LaunchError(Exception):
    """The job cannot be started. None of its processes is running.

    The message is for the user: what was given, what is valid, what to do. It never holds the value of an environment
    variable, which may be a secret.

    Args:
        message: the text.
        exit_code: what launch.py exits with.
    """

    def __init__(self, message: str, exit_code: int = USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@contextmanager
def as_launch_error(prefix: str = "", exit_code: int = USAGE) -> Iterator[None]:
    """Raise a `ConfigError` of the block, such as a bad value of a variable, as a `LaunchError`."""
    try:
        yield
    except ConfigError as error:
        raise LaunchError(f"{prefix}{error}", exit_code) from None


class WorkerFailed(Exception):
    """A process of a job has failed, and so the job. None of its processes is running.

    `launcher.run` raises it. If a worker has raised an exception, `launcher.run` raises that, with this as its cause.

    Args:
        process: the name of the process: `worker 1`, `server 0`, `scheduler`.
        how: what happened to it: `was killed by SIGKILL`, `raised ValueError: no data`.
        details: the traceback in that process, if there is one.
    """

    def __init__(self, process: str, how: str, details: str = "") -> None:
        super().__init__(process, how, details)
        self.process, self.how, self.details = process, how, details

    def __str__(self) -> str:
        return f"{self.process} {self.how}" + (f"\n\n{self.details}" if self.details else "")
