"""The cluster managers' commands: check that they exist, and run them without waiting for an answer."""

from __future__ import annotations

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

    Raises:
        LaunchError: it is not on PATH.
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
