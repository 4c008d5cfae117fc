"""This machine: the limit of open files, the standard streams."""

from __future__ import annotations

import os
import resource
from contextlib import suppress

from launcher.errors import LaunchError

_SPARE_FILES = 64


def require_files(count: int) -> None:
    """Check that this process may open so many files, beside those that every process opens.

    Raises:
        LaunchError: the limit is too low.
    """
    needed, allowed = count + _SPARE_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed != resource.RLIM_INFINITY and needed > allowed:
        raise LaunchError(
            f"this job needs {needed} open files, but {allowed} are allowed; raise that: ulimit -n {needed}"
        )


def open_standard_streams() -> None:
    """Open those that are closed. Otherwise a pipe would get the number, and output would go there."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            with suppress(OSError):
                os.open(os.devnull, os.O_RDWR)
