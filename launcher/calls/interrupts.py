"""Signals and a time limit, which end a job of `launcher.run`."""

from __future__ import annotations

import signal
import threading
from contextlib import suppress

from launcher.supervision.signals import CHILD, SignalQueue

TIME_LIMIT = int(signal.SIGALRM)


class Interrupts(SignalQueue):
    """Signals, in the main thread, which alone can have handlers; and a time limit, which comes as a signal does.

    Args:
        timeout: the limit in seconds; None for no limit.
    """

    def __init__(self, timeout: float | None) -> None:
        super().__init__()
        self.first: int | None = None
        self._main = threading.current_thread() is threading.main_thread()
        self._timer = None if timeout is None else threading.Timer(timeout, self._expire)

    def take(self) -> list[int]:
        """The signals since the last call, in order. Outside the main thread they always include CHILD."""
        received = super().take()
        if self.first is None:
            self.first = next((signum for signum in received if signum != CHILD), None)
        return received if self._main else [*received, CHILD]

    def __enter__(self) -> Interrupts:
        if self._main:
            super().__enter__()
        else:
            self._read.setblocking(False)
            self._write.setblocking(False)
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        if self._main:
            super().__exit__()
        else:
            self._read.close()
            self._write.close()

    def _expire(self) -> None:
        with suppress(BlockingIOError):
            self._write.send(bytes([TIME_LIMIT]))
