"""The use of a process's links: by one thread at a time, and whole again after an exception in the middle.

An exception may come at any moment, because handlers of signals run in the middle of whatever the main thread does.
Whatever state the links are in then, they are dropped and made anew, and requests without an answer are sent again.
Servers recognize repeats.

A signal's handler may raise between any two instructions of the main thread, even in a ``finally``. So a thread is
noted before it takes the lock, and until it has released it. If a thread comes that is noted already, an exception has
ended its last call, and it may still hold the lock. This relies only on what C does in one call: additions to a set,
and an ``RLock``, which knows its holder.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import deque
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

from kvstore.errors import DeadlineExceeded, UsageError
from kvstore.member.links import Links

T = TypeVar("T")


class IOLock:
    """One thread at a time uses the links. Threads that send go before threads that wait for messages.

    ``interrupt`` makes a thread that waits for messages return soon.
    """

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt
        self._lock = threading.RLock()
        self._inside: set[int] = set()  # threads that hold the lock, or that an exception has ended a call of
        self._senders: set[int] = set()  # threads that wait for the lock in order to send
        self._sleepers: deque[threading.Lock] = deque()

    @property
    def entered(self) -> bool:
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


class LinkAccess:
    """Lets one thread at a time use links. Any thread may call it, and waits ``answer_s`` for another thread."""

    def __init__(self, links: Links, answer_s: float) -> None:
        self._links = links
        self._answer_s = answer_s
        self._lock = IOLock(links.interrupt)

    def wake(self) -> None:
        """Wake all threads that wait at the links or for them, so that they look again."""
        self._lock.wake()

    def alone(self, action: Callable[..., T], *args: Any, yielding_s: float | None = None) -> T:
        """Call ``action`` while no other thread uses the links; return what it returns.

        Args:
            yielding_s: if another thread uses the links, wait for it for at most so many seconds, do not call
                ``action``, and return None. By default that thread is interrupted.

        Raises:
            UsageError: this thread uses the links already: a signal's handler, or a destructor, has made the call.
        """
        if self._lock.entered and under_way(_ALONE):
            raise UsageError(
                "a store was called in the middle of another call of the same thread: handlers of signals must not use "
                "stores; let them set a flag, or raise an exception"
            )
        collecting = gc.isenabled()  # decode() may pause the garbage collector, which belongs to the whole process
        try:
            if self._lock.entered:  # an exception has ended an earlier call, and a second one its handling
                self._lock.let_go()
            if yielding_s is None:
                self._acquire()
            elif not self._lock.try_acquire():
                self._lock.sleep(yielding_s)
                return None  # type: ignore[return-value]
            if self._links.torn:
                self._links.mend()
            result = action(*args)
            self._lock.release()
        except BaseException as exc:
            if collecting:
                gc.enable()
            self._recover()
            if exc is not self._links.blamed:
                raise
            self._links.blamed = None
            return None  # type: ignore[return-value]
        return result

    def _acquire(self) -> None:
        if not self._lock.acquire(self._answer_s):
            raise DeadlineExceeded(
                f"another thread of this process has used the links for {self._answer_s:g} s: it may hang in a "
                "callback, or the machine is overloaded"
            )

    def _recover(self) -> None:
        """Leave nothing half done when an exception leaves ``alone``."""
        self._lock.let_go()
        if not self._links.torn:
            return
        self._acquire()
        try:
            if self._links.torn:  # else another thread has seen to it
                self._links.mend()  # if it fails they stay torn, and the next call tries again
        finally:
            self._lock.release()


_ALONE = LinkAccess.alone.__code__
