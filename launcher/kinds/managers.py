"""What launchers need of cluster managers: their commands, which must exist and may not answer, and their units."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from launcher.errors import NOT_FOUND, LaunchError

_TELL_S = 20.0


def require(kind: str, program: str, where: str) -> str:
    """Return the path of a program that a launcher needs.

    Args:
        kind: the name of the launcher.
        program: the program, which must be on PATH.
        where: what to do if it is not, for the error.
    """
    path = shutil.which(program)
    if path is None:
        raise LaunchError(f"--launcher {kind} needs {program} on PATH: {where}", NOT_FOUND)
    return path


def tell(argv: Sequence[str], seconds: float = _TELL_S) -> None:
    """Run a command, and ignore its result.

    It runs in a session of its own, so that a second Ctrl-C does not end it.
    """
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(argv, capture_output=True, timeout=seconds, check=False, start_new_session=True)


_TIME = re.compile(r"(?:(\d+):)?(\d{1,2}):(\d{2})", re.ASCII)
_MEBIBYTES = {"m": 1, "g": 1024}


def mebibytes(size: str) -> int:
    """The number of MiB in a size such as `500m` or `4g`; 0 if it is empty."""
    return 0 if not size else int(size[:-1]) * _MEBIBYTES[size[-1]]


def seconds(time: str) -> int:
    """The number of seconds in a time such as `2:00:00` or `30:00`."""
    match = _TIME.fullmatch(time)
    total = 0
    for part in match.groups("0") if match else ():
        total = total * 60 + int(part)
    if total < 1:
        raise LaunchError(f"--time {time} is not valid; valid: hours:minutes:seconds, such as 2:00:00")
    return total
