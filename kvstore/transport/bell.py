"""A bell: any thread rings it, and a thread that waits for sockets wakes."""

from __future__ import annotations

import contextlib
import socket

from kvstore.transport.system_errors import ignored


class Bell:
    """Readable from the first ``ring`` until ``silence``."""

    def __init__(self) -> None:
        self._hand, self._ear = socket.socketpair()
        self._hand.setblocking(False)
        self._ear.setblocking(False)

    def fileno(self) -> int:
        """The file descriptor to wait for."""
        return self._ear.fileno()

    def ring(self) -> None:
        """Wake the thread that waits, or else the next one that does. Any thread may call it."""
        with ignored():  # full: a wake-up is already there; closed: nobody waits
            self._hand.send(b"\0")

    def silence(self) -> None:
        """Forget all rings so far."""
        with contextlib.suppress(BlockingIOError):
            self._ear.recv(4096)

    def close(self) -> None:
        """Close the bell. Ringing it has no effect from now on."""
        self._hand.close()
        self._ear.close()
