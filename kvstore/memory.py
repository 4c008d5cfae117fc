"""Where the memory of messages comes from. Transports give some that they can send without a copy; this is the rest."""

from __future__ import annotations

from typing import Protocol

from kvstore.wire import Buffer

ALIGN = 64
SMALL = 1 << 14  # bytes; less is cheaper to copy than to have memory, or track its use, of its own


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
