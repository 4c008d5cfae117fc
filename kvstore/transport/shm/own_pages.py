"""Memory of a peer as one's own: mapped so that a write copies the page, and changes nothing for anybody else.

So the values that a server sends can be a program's own arrays without a copy, whatever the program does with them.
Linux shows in a private mapping of a file in /dev/shm what its owner writes, until the page is written to through the
mapping: from then on the page is this process's own. Two things follow:

- A new value at the same place would stay hidden behind such pages. ``/proc`` tells where they are.
- A forked child would see what the owner writes after the parent has given the memory back. So before a fork all of it
  becomes this process's own.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = "npt.NDArray[np.uint8]"

PAGE = mmap.PAGESIZE
PAGEMAP = "/proc/self/pagemap"  # opened each time: in a child after fork, what was opened before is the parent's
_FILE, _THERE = np.uint64(1 << 61), np.uint64(3 << 62)  # in the file, or shared; present or swapped
_SCAN = 3 << 30 | 12 * 8 << 16 | ord("f") << 8 | 16  # PAGEMAP_SCAN, since Linux 6.7; it takes half the time
_SCAN_FILE, _SCAN_THERE = 1 << 2, 1 << 3 | 1 << 4
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14


class OwnPages:
    """Where views of a private mapping are, and ``pristine``, the same memory as its owner has it.

    The views keep this, and this keeps ``pristine``, which the owner does not change meanwhile.
    """

    def __init__(self, address: int, pristine: Bytes) -> None:
        self.address, self.pristine = address, pristine
        self._first = address // PAGE * PAGE
        self._nbytes = -(-(address + len(pristine)) // PAGE) * PAGE - self._first
        _known[id(self)] = self

    def detach(self) -> None:
        """Make all pages this process's own, where they are. The bytes stay the same."""
        # In one call of the system: to read and write back a byte could undo what another thread writes meanwhile.
        if _libc().madvise(ctypes.c_void_p(self._first), ctypes.c_size_t(self._nbytes), _POPULATE_WRITE):
            raise OSError(ctypes.get_errno(), "pages cannot be copied")


class OwnBytes(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes of a private mapping, and views of them."""

    pages: OwnPages | None = None

    def __array_finalize__(self, made_from: object) -> None:
        self.pages = getattr(made_from, "pages", None)


# Takes a torch tensor and the bytes of its new value; returns whether it has become these bytes. If not, they are
# copied into it.
Adopt: TypeAlias = Callable[[Any, OwnBytes], bool]


class PrivateFile:
    """The private mapping of one file of a peer."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd, self._size = fd, size
        weakref.finalize(self, os.close, fd)
        self._bytes = self._map()

    def view(self, offset: int, pristine: Bytes) -> OwnBytes:
        """Return the bytes of ``pristine``, which are at ``offset`` of the file."""
        if has_own_pages(self._bytes.ctypes.data + offset, len(pristine)):
            self._bytes = self._map()  # whoever has written to the old mapping still has it
        made = self._bytes[offset : offset + len(pristine)].view(OwnBytes)
        made.pages = OwnPages(self._bytes.ctypes.data + offset, pristine)
        return made

    def _map(self) -> Bytes:
        return np.frombuffer(mmap.mmap(self._fd, self._size, access=mmap.ACCESS_COPY), np.uint8)


def has_own_pages(address: int, nbytes: int) -> bool:
    """Whether some page with these bytes, of a private mapping of a file, has been written to through the mapping."""
    first, stop = address // PAGE * PAGE, -(-(address + nbytes) // PAGE) * PAGE
    pagemap = os.open(PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if scans():
            return _scan(pagemap, first, stop)
        entries = np.frombuffer(os.pread(pagemap, (stop - first) // PAGE * 8, first // PAGE * 8), np.uint64)
        return bool(((entries & _THERE != 0) & (entries & _FILE == 0)).any())
    finally:
        os.close(pagemap)


@functools.cache
def available() -> bool:
    """Whether this system does all of the above; some that only look like Linux do not."""
    try:
        fd = os.memfd_create("kvstore", os.MFD_CLOEXEC)
        os.ftruncate(fd, 2 * PAGE)
        shared = np.frombuffer(mmap.mmap(fd, 2 * PAGE), np.uint8)
        file = PrivateFile(fd, 2 * PAGE)
        whole, half = file.view(0, shared), file.view(PAGE, shared[PAGE:])
        shared[:] = 1
        seen = bool((whole == 1).all())
        shared[:] = 2
        seen = seen and bool((whole == 2).all()) and not has_own_pages(whole.ctypes.data, 2 * PAGE)
        half[0] = 3
        written = has_own_pages(half.ctypes.data, PAGE) and not has_own_pages(whole.ctypes.data, PAGE)
        whole.pages.detach()  # type: ignore[union-attr]
        shared[:] = 4
        return seen and written and [*shared[PAGE:][:2], whole[0], *half[:2]] == [4, 4, 2, 3, 2]
    except (OSError, AttributeError):
        return False


def _scan(pagemap: int, first: int, stop: int) -> bool:
    found = (ctypes.c_uint64 * 3)()
    # Its size, flags, the range, where it stopped, what is found, at most one range and page; file pages inverted.
    numbers = (
        12 * 8,
        0,
        first,
        stop,
        0,
        ctypes.addressof(found),
        1,
        1,
        _SCAN_FILE,
        _SCAN_FILE,
        _SCAN_THERE,
        _SCAN_FILE,
    )
    return bool(fcntl.ioctl(pagemap, _SCAN, (ctypes.c_uint64 * 12)(*numbers)))


@functools.cache
def scans() -> bool:
    fd = os.open(PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _scan(fd, 0, 0)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(fd)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _detach_all() -> None:
    for known in _known.valuerefs():  # a list: other threads may add to it
        if (pages := known()) is not None:
            pages.detach()


_known: weakref.WeakValueDictionary[int, OwnPages] = weakref.WeakValueDictionary()
os.register_at_fork(before=_detach_all)
