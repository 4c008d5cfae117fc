"""The I/O lock: one thread at a time is at the links. Who wants to send goes before who waits for messages.

The handler of a signal may raise between any two instructions of the main thread, in a ``finally`` too. So a thread is
noted before it takes the lock, and until it has given it back: a thread that comes in and is noted already was thrown
out by an exception, and may still hold the lock. All this relies on is what C does in one call: additions to a set, and
an ``RLock``, which knows who holds it.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from types import CodeType


class IOLock:
    """See the module.

    Args:
        interrupt: makes whoever waits for messages return soon; any thread may call it.
    """

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt
        self._lock = threading.RLock()
        self._inside: set[int] = set()  # threads that hold it, or an exception has thrown out
        self._senders: set[int] = set()  # threads that wait for it in order to send
        self._sleepers: deque[threading.Lock] = deque()

    @property
    def entered(self) -> bool:
        """Whether the calling thread has come in and not gone out again."""
        return threading.get_ident() in self._inside

    @property
    def sleepers(self) -> int:
        """How many threads wait until the lock is given back."""
        return len(self._sleepers)

    def acquire(self, timeout: float) -> bool:
        """Take the lock; whoever receives gives it up. Return whether that was so within ``timeout`` seconds."""
        me = threading.get_ident()
        self._inside.add(me)
        if self._lock.acquire(blocking=False):
            return True
        self._senders.add(me)
        self._interrupt()
        taken = self._lock.acquire(timeout=timeout)
        self._senders.discard(me)
        return taken

    def try_acquire(self) -> bool:
        """Take the lock, unless somebody has it or wants to send."""
        if self._senders:
            return False
        self._inside.add(threading.get_ident())
        if self._lock.acquire(blocking=False):
            return True
        self._inside.discard(threading.get_ident())
        return False

    def release(self) -> None:
        """Give the lock back."""
        self._lock.release()
        self._inside.discard(threading.get_ident())
        if self._sleepers:
            self._rouse()

    def let_go(self) -> None:
        """Give back whatever the calling thread has of it; none is fine too."""
        self._senders.discard(threading.get_ident())
        try:
            while True:
                self._lock.release()
        except RuntimeError:
            pass  # this thread does not hold it, or no longer
        self._inside.discard(threading.get_ident())
        self._rouse()

    def sleep(self, timeout: float) -> None:
        """Wait until another thread gives the lock back, but no longer than ``timeout`` seconds."""
        alarm = threading.Lock()
        alarm.acquire()
        self._sleepers.append(alarm)
        if self.try_acquire():  # it came free before the alarm was set
            self.release()
            return
        alarm.acquire(timeout=timeout)

    def wake(self) -> None:
        """Let everybody who waits look again."""
        self._interrupt()
        self._rouse()

    def _rouse(self) -> None:
        try:
            while True:
                self._sleepers.popleft().release()
        except IndexError:
            pass


def under_way(code: CodeType) -> bool:
    """Whether the calling thread is inside a call of ``code``, apart from that of the function that asks."""
    frame = sys._getframe(1).f_back  # that of the function that asks, left out
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False
