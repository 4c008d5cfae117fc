"""Sizes and times of the command line, for clusters that have their own ways to write them. Pure."""

from __future__ import annotations

import re

from launcher.errors import LaunchError

_TIME = re.compile(r"(?:(\d+):)?(\d{1,2}):(\d{2})", re.ASCII)
_MEBIBYTES = {"m": 1, "g": 1024}


def mebibytes(size: str) -> int:
    """How many MiB `500m` or `4g` are; none if nothing is said."""
    return 0 if not size else int(size[:-1]) * _MEBIBYTES[size[-1]]


def seconds(time: str) -> int:
    """How long `2:00:00` or `30:00` is.

    Raises:
        LaunchError: it is no such time.
    """
    found = _TIME.fullmatch(time)
    total = 0
    for part in found.groups("0") if found else ():
        total = total * 60 + int(part)
    if total < 1:
        raise LaunchError(f"--time {time} is not valid; valid: hours:minutes:seconds, such as 2:00:00")
    return total
