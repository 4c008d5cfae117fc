"""Sizes and times of the command line as numbers, for clusters with notations of their own. No I/O."""

from __future__ import annotations

import re

from launcher.errors import LaunchError

_TIME = re.compile(r"(?:(\d+):)?(\d{1,2}):(\d{2})", re.ASCII)
_MEBIBYTES = {"m": 1, "g": 1024}


def mebibytes(size: str) -> int:
    """The number of MiB in a size such as `500m` or `4g`; 0 if it is empty."""
    return 0 if not size else int(size[:-1]) * _MEBIBYTES[size[-1]]


def seconds(time: str) -> int:
    """The number of seconds in a time such as `2:00:00` or `30:00`.

    Raises:
        LaunchError: it is not a time.
    """
    match = _TIME.fullmatch(time)
    total = 0
    for part in match.groups("0") if match else ():
        total = total * 60 + int(part)
    if total < 1:
        raise LaunchError(f"--time {time} is not valid; valid: hours:minutes:seconds, such as 2:00:00")
    return total
