"""Memory of a slab: zeros, which the system adds page by page as they are first written, and in huge pages if asked."""

from __future__ import annotations

import contextlib
import functools
import mmap
import sys
from pathlib import Path

import numpy as np

PAGE = mmap.PAGESIZE
HUGE = 2 << 20  # bytes of a page that one entry of the processor's address cache covers, where the system has such
ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # how Linux is asked for them
# How Linux is told to make them of what is there, from 6.1 on; before, it is an error. Python does not name it.
COLLAPSE = 25 if sys.platform == "linux" else None
# Each stretch of huge pages makes two mappings more, of which Linux gives a process 65,530.
STRETCHES = 256
MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # whether Linux gives huge pages, as its owner wants it
# Not to be counted against the limit of memory that the system promises. Python names it from 3.13 on; this is Linux's.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class MappedMemory:
    """``nbytes`` of zeros. From half a huge page on, they begin where a huge page can begin.

    Attributes:
        nbytes: how many they are.
        huge_pages: how many huge pages they fill; the last may have room that nobody uses.

    Raises:
        OSError: the system does not give so much virtual memory.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.huge_pages = -(-nbytes // HUGE) if nbytes >= HUGE // 2 else 0
        mapped = (self.huge_pages + 1) * HUGE if self.huge_pages else max(PAGE, nbytes)
        self._memory = mmap.mmap(-1, mapped, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        address = np.frombuffer(self._memory, np.uint8, 1).ctypes.data
        self._first = -address % HUGE if self.huge_pages else 0
        self._asked: set[int] = set()
        self._stretches = 0

    def array(self, dtype: np.dtype[np.generic], count: int) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
        """Return the first ``count`` elements of ``dtype``."""
        return np.frombuffer(self._memory, dtype, count, self._first)

    def advise(self, start: int, stop: int) -> None:
        """Have huge pages from byte ``start`` to ``stop``, made at the first touch, if that is as much as one."""
        start = start // PAGE * PAGE
        if stop - start >= HUGE:
            self._call(ADVICE, start, stop - start)

    def ask(self, number: int) -> bool:
        """Have page ``number`` be a huge one; return False if it has been asked for, or makes too many stretches."""
        stretches = self._stretches + 1 - (number - 1 in self._asked) - (number + 1 in self._asked)
        if number in self._asked or stretches > max(STRETCHES, self._stretches):
            return False
        self._asked.add(number)
        self._stretches = stretches
        self._call(ADVICE, number * HUGE, HUGE)
        return True

    def asked(self, number: int) -> bool:
        """Return whether huge page ``number`` has been asked for."""
        return number in self._asked

    def collapse(self, number: int) -> None:
        """Have huge page ``number`` now, if the system can: what is there of it is copied, which takes 0.5 ms.

        Else Linux does that itself, but slowly: 16 MB in 10 seconds.
        """
        if huge_pages_allowed():
            self._call(COLLAPSE, number * HUGE, HUGE)

    def _call(self, advice: int | None, start: int, nbytes: int) -> None:
        if advice is not None:
            with contextlib.suppress(OSError):  # a system without huge pages, or with none left
                self._memory.madvise(advice, self._first + start, nbytes)


@functools.cache
def huge_pages_allowed() -> bool:
    """Return whether the system gives huge pages to those who ask. A collapse does not heed that it may not."""
    try:
        return "[never]" not in MODE.read_text()
    except OSError:
        return False
