"""Where the memory of messages comes from. Transports give some that they can send without a copy; this is the rest."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import Protocol

from kvstore.wire import Buffer

ALIGN = 64
SMALL = 1 << 14  # bytes; less is cheaper to copy than to have memory, or track its use, of its own


@functools.cache
def keep_freed() -> None:
    """Tell glibc to keep freed memory: every message is allocated, and fresh pages cost 20 % of a transfer."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, (1 << 31) - 1)


class ScatteredFrame(list[memoryview]):
    """A frame that lies in several places, none of them empty; it arrives as one."""


def whole(frame: Buffer | ScatteredFrame) -> Buffer:
    """Return a frame in one place."""
    return bytearray().join(frame) if isinstance(frame, ScatteredFrame) else frame


def space(nbytes: int) -> memoryview:
    """Return plain memory for what is received: aligned for any dtype, at half of what ``Heap.allocate`` costs."""
    import numpy  # only now: what has no arrays to move does without

    return numpy.empty(nbytes, dtype=numpy.uint8).data


class Memory(Protocol):
    """Gives memory to build messages in, and knows who still reads it."""

    def allocate(self, nbytes: int) -> memoryview:
        """Return writable memory, aligned to 64 bytes, that is freed when the last view of it is dropped."""
        ...

    def busy(self, buffer: Buffer) -> bool:
        """Whether a message that was sent may still be read from ``buffer``'s memory; True if nobody can tell."""
        ...


class Heap:
    """Plain memory; see ``Memory``."""

    def allocate(self, nbytes: int) -> memoryview:
        """Return fresh memory."""
        import numpy  # only now: what has no arrays to move does without

        room = numpy.empty(nbytes + ALIGN, dtype=numpy.uint8)
        start = -room.ctypes.data % ALIGN
        return room[start : start + nbytes].data

    def busy(self, buffer: Buffer) -> bool:
        """Nobody can tell."""
        return True
