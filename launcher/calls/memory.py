"""Memory that processes share by inheriting a file descriptor.

It has no name and no size limit. Unlike a pipe, it has no end to wait for, which a stray process could hold open.
"""

from __future__ import annotations

import mmap
import os
import tempfile


def make() -> int:
    """Return a file descriptor of empty memory."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("kvstore-call")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def view(fd: int) -> mmap.mmap:
    """The content as a file to read, with a position of its own."""
    return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
