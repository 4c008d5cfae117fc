"""What a launcher says when it cannot start a job, and when a job has failed that a script had started."""

from __future__ import annotations

USAGE = 2
CANNOT_EXECUTE = 126
NOT_FOUND = 127


class LaunchError(Exception):
    """The job cannot be started as described; nothing of it is running.

    The message is for the user: what was wrong, and what would work. It never holds the value of an environment
    variable. `exit_code` is what launch.py exits with.
    """

    def __init__(self, message: str, exit_code: int = USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class WorkerFailed(Exception):
    """A process of a job has failed, and the job with it; nothing of it is running.

    It is raised by `launcher.run`, or is the cause of what that raises if a worker has raised something else.

    Args:
        process: which: `worker 1`, `server 0`, `scheduler`.
        how: in words: `was killed by SIGKILL`, `raised ValueError: no data`.
        details: the traceback there, if there is one.
    """

    def __init__(self, process: str, how: str, details: str = "") -> None:
        super().__init__(process, how, details)
        self.process, self.how, self.details = process, how, details

    def __str__(self) -> str:
        return f"{self.process} {self.how}" + (f"\n\n{self.details}" if self.details else "")
