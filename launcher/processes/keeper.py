"""The process that outlives launch.py, when that is killed, by as long as it takes to end what it had started.

launch.py holds the other end of the keeper's standard input, and so does each child until it executes its program:

    PID     a process has started, in a session and process group of its own, both called PID
    bye     the job is over and nothing is left; the keeper leaves

If the input ends without a goodbye then launch.py is gone. Nothing else could have told: SIGKILL cannot be caught. A
parent-death signal ends the children, but not theirs.

This file is run by its path, with nothing but the standard library, so that neither the working directory nor
PYTHONPATH decides what it imports. The launcher imports it for `strays`, `signal_all` and `remove_shared`.
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
_SHARED = Path("/dev/shm")  # noqa: S108 (files are only removed)


def strays(sessions: Collection[int], mark: str) -> dict[int, int]:
    """The living processes of a job: pid -> process group.

    A process belongs to the job if it is in one of its sessions, whatever its process group (`timeout` makes its own),
    or if `mark` (`NAME=value`) is in the environment with which it was started, whatever its session. Linux only; empty
    elsewhere.

    Raises:
        OSError: /proc cannot be read: too many files are open.
    """
    found: dict[int, int] = {}
    if not sys.platform.startswith("linux"):
        return found
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
                found[int(entry.name)] = int(group)
        except (OSError, ValueError):
            continue  # it has gone, or is somebody else's
    return found


def signal_all(sessions: Collection[int], mark: str, signum: int) -> None:
    """Send a signal to every process of a job, once to each; to those of its sessions if others cannot be found."""
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
    """Send SIGKILL until nothing is left of a job, because processes fork while one looks; or until patience ends.

    Raises:
        OSError: what is left cannot be found out; all that is known was killed.
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
    """Remove the memory that the processes of a job have shared, and that those that were killed have left.

    What cannot be found, because too many files are open, is for the user's next job to sweep.

    Args:
        job: the value of its mark, which kvstore makes a part of the files' names as it is.
    """
    ours = re.compile(rf"kvstore-{os.getuid()}-{re.escape(job)}-[0-9]+-[0-9a-f]+\.[0-9]+")
    paths: list[Path] = []
    with suppress(OSError):
        paths = list(_SHARED.glob("kvstore-*"))
    for path in paths:
        if ours.fullmatch(path.name):
            with suppress(OSError):
                path.unlink()


def watch(fd: int) -> set[int] | None:
    """Follow what launch.py says until it leaves.

    Returns:
        None if it said goodbye, else the sessions that it has left behind.
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
    """Wait; if launch.py dies, kill what it had started and remove the job's directory and shared memory."""
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
