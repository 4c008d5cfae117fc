"""Cuts the connections of other processes, as a firewall or a broken line would."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

_PIDFD_GETFD = 438  # of Linux, on every architecture; Python has no name for it


def cut(pid: int, number: int, *, unix: bool = False) -> bool:
    """End one of the connections of a process, the ``number``-th modulo how many it has; False if it has none.

    Args:
        unix: one of its unix sockets, instead of TCP.
    """
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(made) for made in connections(pid, unix=unix)]
        if not found:
            return False
        with contextlib.suppress(OSError):  # the other side was faster
            found[number % len(found)].shutdown(socket.SHUT_RDWR)
        return True


def connections(pid: int, *, unix: bool = False) -> Iterator[socket.socket]:
    """Duplicates of a process's connected TCP sockets, or of those that lead to a path; for the caller to close."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        for entry in sorted(Path(f"/proc/{pid}/fd").iterdir(), key=lambda entry: int(entry.name)):
            if not _is_socket(entry):
                continue
            given = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, handle, int(entry.name), 0)
            if given < 0:
                code = ctypes.get_errno()
                if code in (errno.EPERM, errno.ENOSYS):
                    pytest.skip(f"this system does not let a test take sockets of others: {os.strerror(code)}")
                continue  # it has just been closed
            made = socket.socket(fileno=given)
            if _is_connection(made, unix):
                yield made
            else:
                made.close()
    except FileNotFoundError:
        return
    finally:
        os.close(handle)


def _is_connection(made: socket.socket, unix: bool) -> bool:
    try:
        ends = made.getpeername(), made.getsockname()
    except OSError:
        return False
    if unix:
        return made.family == socket.AF_UNIX and any(ends)  # a pair that a process keeps to itself has no names
    return made.family in (socket.AF_INET, socket.AF_INET6)


def _is_socket(entry: Path) -> bool:
    try:
        return str(entry.readlink()).startswith("socket:")
    except OSError:
        return False
