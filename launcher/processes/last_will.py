"""A command that runs if this process dies, to cancel what it has asked a cluster manager to run."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

# If the input ends without a line, the process that held it is dead.
_WAIT = "if read -r line; then exit 0; fi"
_GOODBYE_S = 1.0


class LastWill:
    """A command that a process in a session of its own runs when this process dies, unless it is revoked.

    Args:
        argv: the command; empty for none. Other users can see it, so it must not hold secrets.
        remove: files and directories to remove afterwards.

    Attributes:
        process: the process that waits.
    """

    def __init__(self, argv: Sequence[str] = (), remove: Sequence[Path] = ()) -> None:
        commands = [list(argv)] if argv else []
        if remove:
            commands.append(["rm", "-rf", "--", *map(str, remove)])
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", "\n".join([_WAIT, *map(shlex.join, commands)])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def revoke(self) -> None:
        """The job is over. May be called again."""
        if self.process.stdin is None or self.process.stdin.closed:
            return
        with suppress(OSError):
            self.process.stdin.write(b"bye\n")
            self.process.stdin.close()
        try:
            self.process.wait(_GOODBYE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
