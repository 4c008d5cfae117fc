"""What this machine has: processors, and room for open files."""

from __future__ import annotations

import os
import resource
from contextlib import suppress

from launcher.errors import LaunchError

_SPARE_FILES = 64


def cores() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def require_files(count: int) -> None:
    """See to it that this process may have so many files open, beside those that every process has.

    Raises:
        LaunchError: it may not.
    """
    needed, allowed = count + _SPARE_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed != resource.RLIM_INFINITY and needed > allowed:
        raise LaunchError(
            f"this job needs {needed} open files, but {allowed} are allowed; raise that: ulimit -n {needed}"
        )


def open_standard_streams() -> None:
    """If one is closed, the next pipe would get its number, and our output would go there."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            with suppress(OSError):
                os.open(os.devnull, os.O_RDWR)
