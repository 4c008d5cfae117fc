"""The I/O lock: one thread at a time uses the links. Threads that send go before threads that wait for messages.

A signal's handler may raise between any two instructions of the main thread, even in a ``finally``. So a thread is
noted before it takes the lock, and until it has released it. If a thread comes that is noted already, an exception has
ended its last call, and it may still hold the lock. This relies only on what C does in one call: additions to a set,
and an ``RLock``, which knows its holder.
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
        interrupt: makes a thread that waits for messages return soon. Any thread may call it.
    """

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt
        self._lock = threading.RLock()
        self._inside: set[int] = set()  # threads that hold the lock, or that an exception has ended a call of
        self._senders: set[int] = set()  # threads that wait for the lock in order to send
        self._sleepers: deque[threading.Lock] = deque()

    @property
    def entered(self) -> bool:
        """Whether the calling thread is noted as holding the lock."""
        return threading.get_ident() in self._inside

    @property
    def sleepers(self) -> int:
        """How many threads wait until the lock is released."""
        return len(self._sleepers)

    def acquire(self, timeout: float) -> bool:
        """Take the lock, which a receiving thread gives up. Return whether that succeeded in ``timeout`` seconds."""
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
        """Take the lock, unless another thread holds it or waits to send. Return whether it was taken."""
        if self._senders:
            return False
        self._inside.add(threading.get_ident())
        if self._lock.acquire(blocking=False):
            return True
        self._inside.discard(threading.get_ident())
        return False

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()
        self._inside.discard(threading.get_ident())
        if self._sleepers:
            self._rouse()

    def let_go(self) -> None:
        """Release the lock, however often the calling thread holds it, even if not at all."""
        self._senders.discard(threading.get_ident())
        try:
            while True:
                self._lock.release()
        except RuntimeError:
            pass  # this thread does not hold it, or no longer
        self._inside.discard(threading.get_ident())
        self._rouse()

    def sleep(self, timeout: float) -> None:
        """Wait until another thread releases the lock, for at most ``timeout`` seconds."""
        alarm = threading.Lock()
        alarm.acquire()
        self._sleepers.append(alarm)
        if self.try_acquire():  # it was released before the alarm was set
            self.release()
            return
        alarm.acquire(timeout=timeout)

    def wake(self) -> None:
        """Wake all threads that wait, so that they look again."""
        self._interrupt()
        self._rouse()

    def _rouse(self) -> None:
        try:
            while True:
                self._sleepers.popleft().release()
        except IndexError:
            pass


def under_way(code: CodeType) -> bool:
    """Whether the calling thread is inside a call of ``code``. The call of the asking function does not count."""
    frame = sys._getframe(1).f_back  # without the asking function's
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False
