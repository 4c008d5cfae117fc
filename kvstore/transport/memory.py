"""Memory that messages are built in. Transports may have memory that they send without a copy; this is the rest."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import Protocol

from kvstore import wire

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


class ScatteredFrame(list[memoryview]):
    """A frame in several buffers, none of them empty. It arrives as one."""


def nbytes_of(frame: wire.Buffer | ScatteredFrame) -> int:
    return sum(map(len, frame)) if isinstance(frame, ScatteredFrame) else len(frame)


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
        import numpy  # only now: processes that move no arrays do without

        array = numpy.empty(nbytes + ALIGN, dtype=numpy.uint8)
        start = -array.ctypes.data % ALIGN
        return array[start : start + nbytes].data

    def busy(self, buffer: wire.Buffer) -> bool:
        return True  # plain memory does not tell
