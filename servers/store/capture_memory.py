"""The memory that captures are copied to: touched before it is needed, and used again. Any thread may call it.

A page that no process has used since a virtual machine has started costs far more than the copy itself: 28 us for 4 KB
where we measured it, so 1.5 s for 204 MB. An update that has to wait for a copy would wait for that, too.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

PIECE = 1 << 20  # bytes that are touched at a time: other threads of this process come in between
PAGE = 4096
ALIGN = 64

Bytes = npt.NDArray[np.uint8]


class CaptureMemory:
    """One block of memory, divided among the captures that are under way.

    Attributes:
        wanted: bytes that the captures under way have asked for.
    """

    def __init__(self) -> None:
        self.wanted = 0
        self._block: Bytes = np.empty(0, np.uint8)
        self._used = 0
        self._holders = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """How many bytes are kept."""
        return len(self._block)

    def reserve(self, nbytes: int) -> None:
        """Have at least so many bytes, all of them touched, unless a capture is under way.

        Raises:
            MemoryError: there is not so much; what there was stays.
        """
        if nbytes <= len(self._block):
            return
        block = np.empty(nbytes, np.uint8)
        for start in range(0, nbytes, PIECE):
            block[start : min(nbytes, start + PIECE) : PAGE] = 0
        with self._lock:
            if not self._holders:
                self._block = block

    def hold(self) -> None:
        """Note that a capture begins."""
        with self._lock:
            self._holders += 1

    def take(self, nbytes: int) -> Bytes:
        """Return memory for a capture that holds this: of the block while that lasts, else new."""
        with self._lock:
            start = self._used
            self.wanted += nbytes + -nbytes % ALIGN
            if nbytes <= len(self._block) - start:
                self._used += nbytes + -nbytes % ALIGN
                return self._block[start : start + nbytes]
        return np.empty(nbytes, np.uint8)

    def release(self) -> int:
        """Note that a capture needs nothing any more; return how many bytes all have asked for, if it was the last."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return 0
            wanted, self.wanted, self._used = self.wanted, 0, 0
            return wanted
