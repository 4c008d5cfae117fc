"""What is done if this process dies without a goodbye: what it had asked others to run must not outlive it."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

# Waits for a line; if the input ends without one, whoever held it is dead.
_WAIT = "if read -r line; then exit 0; fi"
_GOODBYE_S = 1.0


class LastWill:
    """Executed by a process of its own, in a session of its own.

    Args:
        argv: a command to run; no secrets, it can be seen. None if empty.
        remove: files and directories that go after that.
    """

    def __init__(self, argv: Sequence[str] = (), remove: Sequence[Path] = ()) -> None:
        commands = [list(argv)] if argv else []
        if remove:
            commands.append(["rm", "-rf", "--", *map(str, remove)])
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", "\n".join([_WAIT, *map(shlex.join, commands)])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def revoke(self) -> None:
        """The job is over; twice is fine."""
        if self._process.stdin is None or self._process.stdin.closed:
            return
        with suppress(OSError):
            self._process.stdin.write(b"bye\n")
            self._process.stdin.close()
        try:
            self._process.wait(_GOODBYE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
