"""The use of a process's links: by one thread at a time, and whole again after an exception in the middle.

An exception may come at any moment, because handlers of signals run in the middle of whatever the main thread does.
Whatever state the links are in then, they are dropped and made anew, and requests without an answer are sent again.
Servers recognize repeats.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, TypeVar

from kvstore.errors import DeadlineExceeded, UsageError
from kvstore.member.io_lock import IOLock, under_way
from kvstore.member.links import Links

T = TypeVar("T")


class LinkAccess:
    """Lets one thread at a time use links. Any thread may call it.

    Args:
        links: used by nobody else.
        answer_s: how long a thread waits for another that uses the links.
    """

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
