"""The cluster managers' own commands: that they are there, and run where nobody waits for an answer."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from launcher.errors import NOT_FOUND, LaunchError

_TELL_S = 20.0


def require(kind: str, program: str, where: str) -> str:
    """Return the path of a program that a kind of launcher cannot do without.

    Args:
        kind: the launcher's name.
        program: what must be on PATH.
        where: what to do about it if it is not.

    Raises:
        LaunchError: it is not.
    """
    path = shutil.which(program)
    if path is None:
        raise LaunchError(f"--launcher {kind} needs {program} on PATH: {where}", NOT_FOUND)
    return path


def tell(argv: Sequence[str], seconds: float = _TELL_S) -> None:
    """Run a command whatever comes of it.

    In a session of its own: who presses Ctrl-C twice does not mean this one.
    """
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(argv, capture_output=True, timeout=seconds, check=False, start_new_session=True)
