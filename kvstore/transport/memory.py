"""Memory that messages are built in. Transports may have memory that they send without a copy; this is the rest."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable
from typing import Protocol

from kvstore import wire
from kvstore.job.system import own_memory_bytes

ALIGN = 64
SMALL = 1 << 14  # bytes; copying less is cheaper than allocating memory for it and tracking its use


@functools.cache
def keep_freed() -> None:
    """Tell glibc to keep freed memory: every message is allocated, and fresh pages cost 20 % of a transfer."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, (1 << 31) - 1)


LOOK_S = 20.0  # between two looks at what this process holds
ENOUGH = 4 << 20  # bytes of growth since the last time that make it worth giving some back


class FreedMemory:
    """Gives back what this process has not used of late: memory for messages, and more of what glibc keeps for it.

    Checkpoints, saved tables and stores that come and go leave free pages between what stays: a server grew by 80 MB.
    Pages that the next round needs are given back, too. Their page faults cost some milliseconds, once in ``LOOK_S``.

    Args:
        trim: of the transport.
        clock: in seconds.
        held: returns how many bytes the process holds for itself alone.
        give_back: gives back all whole pages that glibc has and that are free.
    """

    def __init__(
        self,
        trim: Callable[[], object],
        clock: Callable[[], float],
        held: Callable[[], int] = own_memory_bytes,
        give_back: Callable[[], object] | None = None,
    ) -> None:
        self._trim = trim
        self._clock = clock
        self._held = held
        self._give_back = _malloc_trim() if give_back is None else give_back
        self._left = 0  # what was held after the last time
        self._due = clock() + LOOK_S

    def look(self) -> None:
        """Give back memory, if it is time for that."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + LOOK_S
        self._trim()
        if self._held() - self._left >= ENOUGH:
            self._give_back()
            self._left = self._held()


def _malloc_trim() -> Callable[[], object]:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # no glibc
        return lambda: None
    return functools.partial(trim, ctypes.c_size_t(0))


class ScatteredFrame(list[memoryview]):
    """A frame in several buffers, none of them empty. It arrives as one."""


def whole(frame: wire.Buffer | ScatteredFrame) -> wire.Buffer:
    """Return a frame as a single buffer; copies a scattered one."""
    return bytearray().join(frame) if isinstance(frame, ScatteredFrame) else frame


def space(nbytes: int) -> memoryview:
    """Return plain memory to receive into, aligned for any dtype. It costs half of what ``Heap.allocate`` does."""
    import numpy  # only now: processes that move no arrays do without

    return numpy.empty(nbytes, dtype=numpy.uint8).data


class Memory(Protocol):
    """Allocates memory for messages, and knows whether a peer still reads it."""

    def allocate(self, nbytes: int) -> memoryview:
        """Return writable memory, aligned to 64 bytes. It is freed when its last view is dropped."""
        ...

    def busy(self, buffer: wire.Buffer) -> bool:
        """Whether a peer may still read a message from ``buffer``'s memory; True if that is not known."""
        ...


class Heap:
    """Plain memory, which does not tell whether it is still read."""

    def allocate(self, nbytes: int) -> memoryview:
        if nbytes <= SMALL:  # the value of a small key: what numpy keeps beside it would be larger
            data = bytearray(nbytes + ALIGN)
            start = -ctypes.addressof(ctypes.c_char.from_buffer(data)) % ALIGN
            return memoryview(data)[start : start + nbytes]
        import numpy  # only now: processes that move no arrays do without

        array = numpy.empty(nbytes + ALIGN, dtype=numpy.uint8)
        start = -array.ctypes.data % ALIGN
        return array[start : start + nbytes].data

    def busy(self, buffer: wire.Buffer) -> bool:
        return True  # plain memory does not tell

    def trim(self) -> None:
        """Nothing is kept that could be given back."""
