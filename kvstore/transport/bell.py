"""A bell: wakes, from any thread, whoever waits for files to become readable."""

from __future__ import annotations

import contextlib
import socket

from kvstore.transport.system_errors import ignored


class Bell:
    """Readable from ``ring`` on, until ``silence``; however often it has been rung."""

    def __init__(self) -> None:
        self._hand, self._ear = socket.socketpair()
        self._hand.setblocking(False)
        self._ear.setblocking(False)

    def fileno(self) -> int:
        """What to wait for."""
        return self._ear.fileno()

    def ring(self) -> None:
        """Wake who waits, or who will next. Any thread may call it."""
        with ignored():  # full: a wake-up is already there; closed: nobody waits
            self._hand.send(b"\0")

    def silence(self) -> None:
        """Forget what has been rung."""
        with contextlib.suppress(BlockingIOError):
            self._ear.recv(4096)

    def close(self) -> None:
        """Let go of it; ringing does nothing from now on."""
        self._hand.close()
        self._ear.close()
