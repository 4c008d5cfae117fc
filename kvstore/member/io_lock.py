"""Whose turn it is at a transport: one thread's at a time. Who wants to send goes before who waits for messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Turns:
    """See the module.

    Args:
        interrupt: makes whoever receives return soon; any thread may call it.
    """

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt
        self._changed = threading.Condition()
        self._busy = self._receiving = False
        self._senders = 0

    @contextmanager
    def send(self) -> Iterator[None]:
        """The turn is the caller's in the block; it waits for it, and has whoever receives give it up."""
        with self._changed:
            self._senders += 1
            if self._receiving:
                self._interrupt()
            while self._busy:
                self._changed.wait()
            self._busy = True
        try:
            yield
        finally:
            self._end(sender=True)

    @contextmanager
    def receive(self, timeout: float) -> Iterator[bool]:
        """Yield whether it is this thread's turn; if not, once another's has ended, or ``timeout`` is over."""
        with self._changed:
            mine = not self._busy and not self._senders
            if mine:
                self._busy = self._receiving = True
            else:
                self._changed.wait(timeout)
        try:
            yield mine
        finally:
            if mine:
                self._end(sender=False)

    def wake(self) -> None:
        """Let everybody look again."""
        with self._changed:
            if self._receiving:
                self._interrupt()
            self._changed.notify_all()

    def _end(self, *, sender: bool) -> None:
        with self._changed:
            self._busy = self._receiving = False
            self._senders -= sender
            self._changed.notify_all()
