"""What launch.py says when it cannot start a job."""

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
