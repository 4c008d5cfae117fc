"""Processes to measure, started together on this machine or in network namespaces.

Each process is one *member*. When one fails, or the time is over, all others are ended; none is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 900.0
GRACE_S = 10.0
POLL_S = 0.02
LINES = 12  # of a failed process's output


class Unavailable(Exception):
    """Something cannot be measured on this machine. The message says why, and what to do."""


class JobFailed(Exception):
    """A measured process failed. The message has the end of its output."""


@dataclass(frozen=True)
class Place:
    """Where a member runs.

    Attributes:
        address: how others reach it there.
        namespace: the network namespace, if it is not this machine's own; the host's name there, too. MPI takes
            processes with the same host name to be on one host, and lets them share memory.
        shm: the directory that is /dev/shm there. Namespaces of the network share the machine's, and members on
            different hosts would find each other's memory in it: nothing would cross the wire.
    """

    address: str = "127.0.0.1"
    namespace: str = ""
    shm: str = ""

    def wrap(self, argv: Sequence[str]) -> list[str]:
        """Return the command that runs ``argv`` at this place."""
        if not self.namespace:
            return list(argv)
        # `ip netns exec` gives the process mounts of its own, so this one is seen by it and its children alone.
        script = 'hostname "$0" && mount --bind "$1" /dev/shm && shift && exec "$@"'
        alone = ["unshare", "--uts", "--ipc", "sh", "-c", script, self.namespace, self.shm]
        return ["ip", "netns", "exec", self.namespace, *alone, *argv]


HERE = Place()


@dataclass(frozen=True)
class Member:
    """One process: its name in errors, its command, additions to our environment, and its place."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    place: Place = HERE


def run(members: Sequence[Member], report: Path, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Start all members and wait for them.

    Args:
        members: in the order in which to start them.
        report: the file that one of them leaves.
        timeout_s: how long they may take.

    Returns:
        What the report says.

    Raises:
        JobFailed: one of them failed, or there is no report.
    """
    with contextlib.ExitStack() as stack:
        started: list[tuple[Member, subprocess.Popen[bytes], Any]] = []
        stack.callback(lambda: _end([process for _, process, _ in started]))
        for member in members:
            log = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                member.place.wrap(member.argv),
                env={**_environment(), **member.env},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            started.append((member, process, log))
        deadline = time.monotonic() + timeout_s
        waiting = started
        while waiting:
            for member, process, log in waiting:
                if process.poll():
                    raise JobFailed(f"{member.name} exited with {process.returncode}{_last_lines(log)}")
            waiting = [one for one in waiting if one[1].returncode is None]
            if time.monotonic() > deadline:
                member, _, log = waiting[0]
                raise JobFailed(f"{member.name} had not ended after {timeout_s:g} s{_last_lines(log)}")
            time.sleep(POLL_S)
    try:
        figures: dict[str, Any] = json.loads(report.read_text())
    except FileNotFoundError:
        raise JobFailed("all processes ended, but none left a report") from None
    return figures


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Make a directory for a job: for its report, and for the file through which processes find each other."""
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as path:
        yield Path(path)


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _environment() -> dict[str, str]:
    """Return our environment without the variables of a job that we may run in ourselves."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("DMLC_")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    return env


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the processes that still run: with SIGTERM first, because a launcher has to end its own processes."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.wait()


def _last_lines(log: Any) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()[-LINES:]
    return ":\n" + "\n".join(f"    {line}" for line in lines) if lines else ""
