"""The keeper: a process that ends a job's processes if launch.py, or an agent, is killed.

Its parent holds the other end of the keeper's standard input, and so does each child until it executes its program.
They write lines:

    PID     a process has started; its session and its process group have the number PID, too
    bye     the job is over and no process is left; the keeper exits

If the input ends without `bye`, the parent is dead. This is the only way to tell, because SIGKILL cannot be caught. A
parent-death signal ends the children, but not the processes that they have started.

This file is run by its path and imports only the standard library. So neither the working directory nor PYTHONPATH
decides what it imports. The launcher imports it for `strays`, `signal_all` and `remove_shared`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

PATIENCE_S = 3.0
POLL_S = 0.02
_PROC = Path("/proc")
SHARED = Path("/dev/shm")  # noqa: S108 (files are only removed)


def strays(sessions: Collection[int], mark: str) -> dict[int, int]:
    """The processes of a job that are alive: pid -> process group. Linux only; empty on other systems.

    A process belongs to the job if its session is one of `sessions`, or if the environment that it was started with has
    `mark` (`NAME=value`). Its process group does not matter: programs such as `timeout` make their own.

    Raises:
        OSError: /proc cannot be read, because too many files are open.
    """
    alive: dict[int, int] = {}
    if not sys.platform.startswith("linux"):
        return alive
    sought, me = mark.encode(), os.getpid()
    for entry in os.scandir(_PROC):
        if not entry.name.isdigit() or int(entry.name) == me:
            continue
        process = _PROC / entry.name
        try:
            # "pid (name) state ppid group session ...", and the name may hold anything.
            state, _, group, session = (process / "stat").read_bytes().rpartition(b")")[2].split()[:4]
            if state in (b"Z", b"X"):
                continue
            if int(session) in sessions or sought in (process / "environ").read_bytes().split(b"\0"):
                alive[int(entry.name)] = int(group)
        except (OSError, ValueError):
            continue  # it has exited, or belongs to another user
    return alive


def signal_all(sessions: Collection[int], mark: str, signum: int) -> None:
    """Send a signal once to every process of a job. If /proc cannot be read, only its process groups get it."""
    for group in sessions:
        try:
            os.killpg(group, signum)
        except (ProcessLookupError, PermissionError):
            continue
    others: dict[int, int] = {}
    with suppress(OSError):
        others = strays(sessions, mark)
    for pid, group in others.items():
        if group not in sessions:
            try:
                os.kill(pid, signum)
            except (ProcessLookupError, PermissionError):
                continue


def kill_all(sessions: Collection[int], mark: str, patience: float = PATIENCE_S) -> None:
    """Send SIGKILL until no process of a job is left, because processes may fork meanwhile; for `patience` at most.

    `sessions, mark`: see `strays`. Raises OSError: /proc cannot be read. The job's process groups have been killed.
    """
    deadline = time.monotonic() + patience
    while True:
        signal_all(sessions, mark, signal.SIGKILL)
        late = time.monotonic() > deadline
        try:
            if not strays(sessions, mark) or late:
                return
        except OSError:
            if late:
                raise
        time.sleep(POLL_S)


def remove_shared(job: str) -> None:
    """Remove the shared memory that killed processes of a job have left; its name is a part of the names of the files.

    If it cannot be listed, because too many files are open, the user's next job removes it.
    """
    ours = re.compile(rf"kvstore-{os.getuid()}-{re.escape(job)}-[0-9]+-[0-9a-f]+\.[0-9]+")
    paths: list[Path] = []
    with suppress(OSError):
        paths = list(SHARED.glob("kvstore-*"))
    for path in paths:
        if ours.fullmatch(path.name):
            with suppress(OSError):
                path.unlink()


def watch(fd: int) -> set[int] | None:
    """Read lines until the end.

    Returns None after `bye`, else the sessions of the processes that the parent has left.
    """
    sessions: set[int] = set()
    buffer = b""
    while data := os.read(fd, 4096):
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            if line == b"bye":
                return None
            sessions.add(int(line))
    return sessions


def main(directory: str, mark: str, job: str) -> int:
    """Wait. If the parent dies, kill the job's processes, and remove its directory and its shared memory."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    sessions = watch(sys.stdin.fileno())
    if sessions is not None:
        with suppress(OSError):
            kill_all(sessions, mark)
        shutil.rmtree(directory, ignore_errors=True)
        remove_shared(job)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
