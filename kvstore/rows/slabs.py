"""Slabs: columns of a table in memory that grows without being copied.

Virtual memory is reserved once; the system adds pages as they are first written, or touched ahead. All slabs of a table
are parallel: an item's number, its *slot*, is the same in each. Slabs of several tables can lie in one array; see
``SlabSpace``.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import sys
from collections import deque
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Slots: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"  # of int64 or int32

RESERVED = 1 << 36  # bytes of virtual memory for a slab whose final size is unknown
# A process that has so many bytes of virtual memory reserves no more. Most machines give it 2^47. With none left, no
# thread starts, and torch crashes.
MOST = 1 << 45
SMALL = 1 << 30  # bytes that are never too much

PAGE = mmap.PAGESIZE
HUGE = 2 << 20  # bytes of a page that one entry of the processor's address cache covers, where the system has such
ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # how Linux is asked for them
# How Linux is told to make them of what is there, from 6.1 on; before, it is an error. Python does not name it.
COLLAPSE = 25 if sys.platform == "linux" else None
# Each stretch of huge pages makes two mappings more, of which Linux gives a process 65,530.
STRETCHES = 256
MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # whether Linux gives huge pages, as its owner wants it
AHEAD = 64 << 10  # bytes that are touched ahead at a time: 16 pages take 10 us, or 100 in a virtual machine
# Not to be counted against the limit of memory that the system promises. Python names it from 3.13 on; this is Linux's.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class MappedMemory:
    """``nbytes`` of zeros. From half a huge page on, they begin where a huge page can begin.

    Raises:
        OSError: the system does not give so much virtual memory.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        huge_pages = -(-nbytes // HUGE) if nbytes >= HUGE // 2 else 0
        mapped = (huge_pages + 1) * HUGE if huge_pages else max(PAGE, nbytes)
        self._memory = mmap.mmap(-1, mapped, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        address = np.frombuffer(self._memory, np.uint8, 1).ctypes.data
        self._first = -address % HUGE if huge_pages else 0
        self._pages = huge_pages
        self._used: dict[int, int] = {}  # bytes, by huge page, of those that are not huge ones yet
        self._asked: set[int] = set()
        self._stretches = 0
        self._waiting: deque[int] = deque()  # huge pages that are there in small ones

    def array(self, dtype: np.dtype[np.generic], count: int) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
        return np.frombuffer(self._memory, dtype, count, self._first)

    def use(self, number: int, nbytes: int) -> bool:
        """Note that so many more bytes of huge page ``number`` are used; return whether it is to be a huge one now.

        That is where half of it is used, so that memory at most doubles. Slabs of several tables can lie in one page.
        Then all that lies there counts, whosever it is.
        """
        if number in self._asked or number >= self._pages:
            return False
        self._used[number] = used = self._used.get(number, 0) + nbytes
        stretches = self._stretches + 1 - (number - 1 in self._asked) - (number + 1 in self._asked)
        if 2 * used < HUGE or stretches > max(STRETCHES, self._stretches):
            return False
        del self._used[number]
        self._asked.add(number)
        self._waiting.append(number)
        self._stretches = stretches
        self._call(ADVICE, number * HUGE, HUGE)
        return True

    def collapse(self) -> bool:
        """Make a huge page of small ones that are there, if the system can; return whether there are more of them.

        That takes 0.5 to 1 ms, or 20 in a virtual machine. Else Linux does it itself, but slowly: 16 MB in 10 seconds.
        """
        if self._waiting:
            number = self._waiting.popleft()
            if huge_pages_allowed():
                self._call(COLLAPSE, number * HUGE, HUGE)
        return bool(self._waiting)

    def touch(self, start: int, stop: int) -> None:
        """Have the system add the pages that begin from byte ``start`` on and before ``stop``, which are zero."""
        first = self._first + -(-start // PAGE) * PAGE
        np.frombuffer(self._memory, np.uint8)[first : self._first + stop : PAGE] = 0

    def _call(self, advice: int | None, start: int, nbytes: int) -> None:
        if advice is not None:
            with contextlib.suppress(OSError):  # a system without huge pages, or with none left
                self._memory.madvise(advice, self._first + start, nbytes)


@functools.cache
def huge_pages_allowed() -> bool:
    """Return whether the system gives huge pages to processes that ask. A collapse does not heed it."""
    try:
        return "[never]" not in MODE.read_text()
    except OSError:
        return False


class Slab:
    """``items[slot]`` for as many slots as are asked for; new ones are zero.

    Args:
        columns: how wide an item is; None for items that are numbers.

    Attributes:
        items: all items, of shape ``(capacity, columns)`` or ``(capacity,)``. It is another array after ``reserve``.
        whole: the array that has them: ``items``, or that of several slabs.
        memory: of ``whole``; None before the first ``reserve``.
    """

    def __init__(self, columns: int | None, dtype: Any, most: int | None = None) -> None:
        self._shape = () if columns is None else (columns,)
        self.dtype = np.dtype(dtype)
        self.item_bytes = self.dtype.itemsize * (1 if columns is None else columns)
        self._most = most
        self.memory: MappedMemory | None = None
        self.first = 0
        self.items: Array = np.empty((0, *self._shape), self.dtype)
        self.whole = self.items
        self._begin()

    def part(self, first: int, count: int, grows: bool) -> Slab:
        """Return a slab of ``count`` of this one's items, which are there, from ``first`` on.

        Args:
            first, count: which items nobody else has.
            grows: whether there may have to be more. Then they are copied to memory of their own.
        """
        made = Slab(self._shape[0] if self._shape else None, self.dtype, None if grows else count)
        made.memory, made.whole, made.first = self.memory, self.whole, first
        made.items = self.whole[first : first + count]
        made._begin()
        return made

    @classmethod
    def like(cls, other: Slab, most: int) -> Slab:
        """Return an empty slab of the same kind of items, of which there can be ``most``."""
        return cls(other._shape[0] if other._shape else None, other.dtype, most)

    def reserve(self, count: int) -> bool:
        """See to it that there are ``count`` items; what is there keeps its values. Return whether they have moved."""
        if count <= len(self.items):
            return False
        old = self.items
        if self._most is not None and count <= self._most:
            wanted = self._most
        else:
            wanted = max(RESERVED // self.item_bytes, 2 * count)
        self.items, self.first = self._reserved(wanted, count), 0
        self.whole = self.items
        self.items[: len(old)] = old
        self._begin()
        self._touched = old.nbytes
        return True

    def _begin(self) -> None:
        self._filled = self._touched = self.first * self.item_bytes

    def fill(self, count: int, loaded: bool = False) -> bool:
        """Note that the first ``count`` items, which are there, are written next.

        Random rows are gathered and scattered in four fifths of the time where they lie in huge pages.

        Args:
            loaded: whether that may take long, so that huge pages are made at once. In a virtual machine that gives
                memory back to its host, one takes as long as 5 to 10 times as much memory in small ones.

        Returns:
            Whether there is something to ``collapse`` now.
        """
        start, stop = self._filled, (self.first + count) * self.item_bytes
        there, self._touched = self._touched, max(stop, self._touched)
        if stop - start < AHEAD or self.memory is None:  # a little more is noted together with what comes next
            return False
        self._filled = stop
        more = False
        while start < stop:
            page = start // HUGE
            end = min(stop, (page + 1) * HUGE)
            if not loaded and end - max(start, there) >= HUGE // 2:
                # At a touch Linux makes a huge page, unless there is a small one: so the last small page comes first.
                self.memory.touch(end - PAGE, end)
            more |= self.memory.use(page, end - start)
            start = end
        while more and loaded:
            more = self.memory.collapse()
        return more

    def touch(self, count: int) -> bool:
        """Have memory for a few more of the first ``count`` items, before they are written; return whether it has."""
        stop = (self.first + min(count, len(self.items))) * self.item_bytes
        start = self._touched
        if start >= stop or self.memory is None:
            return False
        self._touched = min(stop, start + AHEAD)
        self.memory.touch(start, self._touched)
        return True

    def collapse(self) -> bool:
        return self.memory is not None and self.memory.collapse()

    def _reserved(self, wanted: int, least: int) -> Array:
        memory: MappedMemory | None = None
        for items in dict.fromkeys((wanted, min(wanted, 2 * least), least)):  # with less, it is copied when it grows
            nbytes = items * self.item_bytes
            if nbytes > SMALL and virtual_bytes() + nbytes > MOST:
                continue
            with contextlib.suppress(OSError):  # a limit of address space
                memory = MappedMemory(nbytes)
                break
        if memory is None:
            raise MemoryError(f"{least * self.item_bytes} bytes for the rows of a table")
        self.memory = memory
        columns = self._shape[0] if self._shape else 1
        return memory.array(self.dtype, items * columns).reshape(items, *self._shape)


def virtual_bytes() -> int:
    """Return how much virtual memory this process has; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    except (OSError, ValueError, IndexError):
        return 0


def gather(items: Array, slots: Slots, out: Array | None = None) -> Array:
    """Return ``items[slots]``, in ``out`` if given. The slots must be in range: they are not checked."""
    return items.take(slots, axis=0, out=out, mode="clip")  # the mode that needs no second copy


def scatter(items: Array, slots: Slots, values: Array) -> None:
    """Set ``items[slots] = values``, a whole item at a time.

    Args:
        items, values: contiguous, of the same dtype.
        slots: in range, none twice.
    """
    if items.ndim == 1:
        items[slots] = values
        return
    whole = _whole(items.dtype.itemsize * items.shape[1])
    scatter_whole(items.view(whole), slots, values.view(whole))


@functools.cache
def _whole(nbytes: int) -> np.dtype[np.void]:
    return np.dtype((np.void, nbytes))


def scatter_whole(items: Array, slots: Slots, values: Array) -> None:
    """Do what ``scatter`` does with items that are one element each."""
    if values.flags.writeable:
        items.put(slots, values, mode="clip")
    else:  # ``put`` would copy them first
        items[slots] = values
