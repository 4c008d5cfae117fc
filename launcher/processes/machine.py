"""This machine: the limit of open files, the standard streams, the terminal."""

from __future__ import annotations

import os
import resource
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from launcher.errors import LaunchError

_SPARE_FILES = 64


def require_files(count: int) -> None:
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


def in_foreground() -> bool:
    """Whether this process may read its standard input: in the background, the terminal's input is the shell's."""
    if not os.isatty(0):
        return True
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # the terminal is not this session's, so there is no shell that reads from it
        return True


@contextmanager
def terminal_kept() -> Iterator[None]:
    """Put the terminal back into its mode at the end: a worker that is killed at a prompt leaves it without echo."""
    before = None
    with suppress(OSError, termios.error):
        before = termios.tcgetattr(0)
    try:
        yield
    finally:
        if before is not None and in_foreground():
            with suppress(OSError, termios.error):
                termios.tcsetattr(0, termios.TCSANOW, before)
