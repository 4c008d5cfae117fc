"""Signals as events of a selector, instead of interrupts."""

from __future__ import annotations

import signal
import socket
from types import FrameType
from typing import Any

from kvstore.job.processes import signal_name

# The signals that ask launch.py to exit, and the one that reports the exit of a child.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CHILD = signal.SIGCHLD


def called(signum: int) -> str:
    """What a user calls a signal."""
    return "Ctrl-C" if signum == signal.SIGINT else signal_name(signum)


class SignalQueue:
    """Collects signals while it is entered. A selector finds it readable when there are any. Main thread only."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._before: dict[int, Any] = {}
        self._before_fd = -1

    def fileno(self) -> int:
        """For a selector."""
        return self._read.fileno()

    def take(self) -> list[int]:
        """The signals received since the last call, in order."""
        try:
            return list(self._read.recv(4096))
        except BlockingIOError:
            return []

    def __enter__(self) -> SignalQueue:
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._before_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for signum in (*ENDING, CHILD):
            # `nohup launch.py ...` begins with SIGHUP ignored, `launch.py ... &` in a script with SIGINT ignored:
            # Ctrl-C is meant for what runs in the foreground then.
            if signum in (signal.SIGHUP, signal.SIGINT) and signal.getsignal(signum) is signal.SIG_IGN:
                continue
            self._before[signum] = signal.signal(signum, _leave_it_to_the_queue)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._before_fd)
        self._read.close()
        self._write.close()


def _leave_it_to_the_queue(signum: int, frame: FrameType | None) -> None:
    """Do nothing. Without a handler, the signal would have its default effect."""
