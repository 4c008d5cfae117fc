"""The pulse: a small process that beats for a worker, ``python -m kvstore.member.pulse``.

A call into C that keeps the interpreter's lock stops all threads of a worker, the heartbeat's too. This process beats
for the worker as long as the worker's process exists and is not stopped, since slow is not dead. It reads all that it
needs from its standard input, and ends when that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

from kvstore.job.config import Config
from kvstore.job.curve_keys import CurveKeys
from kvstore.job.processes import complete, source_root, words
from kvstore.transport.choose import links
from kvstore.wire import Node, ProcessAlive, encode

_STOPPED = "TtZX"  # states of processes that are stopped, traced, zombies or dead
_LONGEST = 1 << 20  # bytes of the input; the keys of 4,096 members are 164 KiB
END_S = 1.0


class PulseProcess:
    """The process that beats for this one.

    Args:
        config: how to reach the scheduler.
        node: this process.

    Raises:
        OSError: the system allows no more processes or open files.
    """

    def __init__(self, config: Config, node: Node) -> None:
        told = {
            "pid": os.getpid(),
            "node": [*node],
            "interval_s": config.heartbeat_s,
            "root": config.root,
            "keys": config.keys and [config.keys.secret, config.keys.root, sorted(config.keys.members)],
            "transport": config.transport,
            "congestion": config.congestion,
        }
        self._process = subprocess.Popen(
            words(sys.executable, "kvstore.member.pulse"),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=complete(_nobodys(os.environ), source_root()),
            start_new_session=True,  # Ctrl-C, and a stop of the whole group, are for the worker
        )
        with contextlib.suppress(BrokenPipeError):  # it has ended, and has said why
            self._pipe.write(json.dumps(told).encode() + b"\n")
            self._pipe.flush()

    @property
    def _pipe(self) -> IO[bytes]:
        return cast("IO[bytes]", self._process.stdin)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it has ended by itself."""
        return self._process.poll() is not None

    def end(self) -> None:
        """End it."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _nobodys(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``env`` without the variables that make a process a member of a job, some of which are secrets."""
    return {name: value for name, value in env.items() if not name.startswith(("DMLC_", "KVSTORE_"))}


def available() -> bool:
    """Whether this system tells if a process is stopped."""
    return Path("/proc/self/stat").exists()


def runs(stat: str) -> bool:
    """Whether a process is neither stopped nor dead; ``stat`` is its line in /proc."""
    return stat.rpartition(")")[2].split()[0] not in _STOPPED


def _beat(told: dict[str, Any]) -> None:
    """Beat until the parent has ended, or has closed the pipe."""
    keys = None
    if told["keys"]:
        secret, root, members = told["keys"]
        keys = CurveKeys(secret, root, frozenset(members))
    config = Config(root=told["root"], keys=keys, transport=told["transport"], congestion=told["congestion"])
    transport = links(config)()
    try:
        scheduler = transport.connect(told["root"])
        pulse = encode(ProcessAlive(Node(*told["node"])))
        stat = Path(f"/proc/{told['pid']}/stat")
        while os.getppid() == told["pid"]:
            with contextlib.suppress(OSError):  # it is no more
                if runs(stat.read_text()):
                    transport.send(scheduler, pulse)
            while transport.recv(0) is not None:  # at most the news that the link has been made anew
                pass
            if select.select([sys.stdin.buffer], [], [], told["interval_s"])[0]:
                return
    finally:
        transport.close()


def main() -> None:
    """Read the input, and beat."""
    _beat(json.loads(sys.stdin.buffer.readline(_LONGEST)))


if __name__ == "__main__":
    main()
