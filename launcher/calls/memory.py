"""Memory that processes share by inheriting a file descriptor.

It has no name, no limit but the machine's, and no end to wait for, as a pipe has, which a stranger may hold open.
"""

from __future__ import annotations

import mmap
import os
import tempfile


def make() -> int:
    """A file descriptor of memory that is empty."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("kvstore-call")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def view(fd: int) -> mmap.mmap:
    """What stands there, as a file to read. Its position is the reader's own."""
    return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
