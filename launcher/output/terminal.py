"""What the terminal of launch.py can show."""

from __future__ import annotations

import os
from collections.abc import Mapping

from kvstore.job.settings import NO_COLOR

# The size of a terminal that does not know its own.
_COLUMNS = 80
_LINES = 24


def wants_color(fd: int, environ: Mapping[str, str]) -> bool:
    """Whether a descriptor is a terminal with colors, and the user wants them (https://no-color.org)."""
    return not environ.get(NO_COLOR.name) and is_terminal(fd, environ)


def is_terminal(fd: int, environ: Mapping[str, str]) -> bool:
    """Whether a descriptor is a terminal that can erase a line."""
    return environ.get("TERM") != "dumb" and os.isatty(fd)


def height(fd: int) -> int:
    """The height of a terminal, in lines."""
    return _size(fd).lines or _LINES


def columns(fd: int, environ: Mapping[str, str]) -> int:
    """The width of a terminal that can erase a line; 0 for anything else."""
    if not is_terminal(fd, environ):
        return 0
    return _size(fd).columns or _COLUMNS


def _size(fd: int) -> os.terminal_size:
    try:
        return os.get_terminal_size(fd)
    except OSError:  # it has been closed
        return os.terminal_size((0, 0))
