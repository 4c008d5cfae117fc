"""The use of a process's links: by one thread at a time, and whole again after an exception in the middle.

An exception may come at any moment, because handlers of signals run in the middle of whatever the main thread does.
Whatever state the links are in then, they are dropped and reconnected, and requests without an answer are resent.
Servers recognize repeats.
"""

# A signal's handler may raise between any two instructions of the main thread. What does not work against that:
#
# - ``try``/``finally`` and ``with``: the exception may come in the ``finally``, before its first line, or between
#   ``__enter__`` and the block, and then nobody releases the lock.
# - Masking the signal (``pthread_sigmask``): Python runs the handler of a signal that came before the mask, or to
#   another thread, in the main thread all the same; and a mask costs two system calls for each message.
# - A flag of one's own ("this thread is inside"): after an exception in the wrong place it stays set for ever, and the
#   thread's next call looks like a call from a handler in the middle of another.
# - Replacing handlers: they are the program's, and ``signal.signal`` works in the main thread only.
# - A thread that owns the links, to which callers hand requests: see docs/architecture.md, "Choices".
#
# What works rests only on what C does in one call, which no handler can interrupt: additions to a set, and an RLock,
# which knows its holder. A thread puts itself into ``_inside`` before it takes the lock, and takes itself out after it
# has released it. If it comes again and is in there, either an exception has ended its last call, so it may hold the
# lock and ``let_go`` releases it; or this is a call in the middle of another call of the same thread. ``under_way``
# tells which: only in the second case is ``alone`` among the frames of the thread. The stack cannot be wrong.

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
        return len(self._sleepers)

    # What ``_inside`` says of a thread:
    #
    #     _inside    holds the lock    means
    #     no         no                it is not here
    #     yes        no                it is about to take the lock, or an exception came before it did
    #     yes        yes               it uses the links, or an exception has ended its call
    #     no         yes               never: it is put in first and taken out last
    #
    # In ``_senders`` it is only while it waits in ``acquire``; an exception may leave it there, and ``let_go`` takes it
    # out. Until then threads that receive keep away, which costs time but no message.

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
        # Not a Condition: its ``wait`` has a ``finally`` that takes the lock again, and an exception there would leave
        # this thread with a lock that it does not know of. A Lock of its own can be lost without harm.
        alarm = threading.Lock()
        alarm.acquire()
        self._sleepers.append(alarm)
        if self.try_acquire():  # it was released before the alarm was set
            self.release()
            return
        alarm.acquire(timeout=timeout)

    def wake(self) -> None:
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
    # Code objects are compared, not names: a subclass or a wrapper of the same name is another call.
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
            if self._links.in_doubt:
                self._links.recover()
            result = action(*args)
            # No ``finally``: whatever goes wrong before this line is done with by ``_recover``, the lock included.
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
        self._lock.let_go()
        if not self._links.in_doubt:
            return
        self._acquire()
        try:
            if self._links.in_doubt:  # else another thread has seen to it
                self._links.recover()  # if it fails they stay in doubt, and the next call tries again
        finally:
            self._lock.release()


_ALONE = LinkAccess.alone.__code__
