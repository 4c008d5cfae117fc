"""What this process is called: its host's name, and its name in ps, top and pgrep, such as ``worker-3``.

Linux keeps 15 bytes for a process beside its command line. They are not the command line, which is the user's, so the
name of a worker is in ``ps -e``, ``top`` and ``pgrep``, and its script still in ``ps aux``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

_LONGEST = 15  # bytes that Linux keeps
_COMM = Path("/proc/self/comm")  # that of the main thread, whichever thread writes; prctl would name the calling one
_named: tuple[str, str] | None = None  # what this process was called before, and is called now


def host_name() -> str:
    return socket.gethostname().encode(errors="replace").decode()


def title(role: str, rank: int) -> str:
    """Return the name of a member's process: ``worker-3``, as its log file; the role alone where no rank is known."""
    return role if role == "scheduler" or rank < 0 else f"{role}-{rank}"


def entitle(role: str, rank: int) -> None:
    """Call this process after what it is, unless its program has given it a name."""
    global _named
    before = _comm()
    if before in _given():
        _named = before, title(role, rank)[:_LONGEST]
        _set_comm(_named[1])


def show(words: Sequence[bytes], variables: Sequence[bytes]) -> None:
    """Let ``ps`` and ``/proc`` show these words and ``NAME=value`` as what this process was started with, if they fit.

    The kernel reads both from where it has put them when the process began. Nothing may use the old variables: see
    ``os.environ.clear``.
    """
    with contextlib.suppress(OSError, ValueError):
        # "pid (name) state ...": the state is the third field, and arg_start to env_end are the 48th to the 51st.
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        ends = list(map(int, fields[45:49]))
        for start, end, strings in zip(ends[::2], ends[1::2], (words, variables), strict=True):
            text = b"".join(string + b"\0" for string in strings)
            if start and len(text) <= end - start:
                ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _forget() -> None:
    """Be called as before: a fork, such as a process of a DataLoader, is no member, and members are killed by name."""
    if _named is not None and _comm() == _named[1]:
        _set_comm(_named[0])


os.register_at_fork(after_in_child=_forget)


def _given() -> set[str]:
    """Return what the system calls a process by itself: the file that it executes."""
    files = (sys.executable, os.path.realpath(sys.executable), *sys.orig_argv[:1], *sys.argv[:1])
    return {os.fsdecode(os.fsencode(Path(file).name)[:_LONGEST]) for file in files}


def _comm() -> str:
    try:
        return os.fsdecode(_COMM.read_bytes().removesuffix(b"\n"))
    except OSError:  # no Linux
        return ""


def _set_comm(name: str) -> None:
    with contextlib.suppress(OSError):
        _COMM.write_bytes(os.fsencode(name))
