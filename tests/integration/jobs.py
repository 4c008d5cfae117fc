"""Starts real jobs with launch.py and looks at their processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from jobkeys import variables
from proc import state
from waiting import LONG, PROMPT, until

# Every process of a job says itself how it has ended; test_bad_calls.py has what launch.py makes of that.
FAST = {"KVSTORE_HEARTBEAT_S": "0.2", "KVSTORE_HEARTBEAT_TIMEOUT_S": f"{PROMPT:g}", "KVSTORE_VERBOSE": "1"}


@dataclass
class Job:
    """A running launch.py. ``members`` finds its processes by the role that their environment gives them."""

    process: subprocess.Popen[str]
    mark: str
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text()

    def members(self, role: str | None = None, rank: int | None = None) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                pairs = (item.partition("=") for item in (entry / "environ").read_text(errors="replace").split("\0"))
                env = {name: value for name, _, value in pairs}
                if env.get("TEST_MARK") != self.mark or "DMLC_ROLE" not in env or state(entry.name) == "Z":
                    continue
                if role in (None, env["DMLC_ROLE"]) and rank in (None, int(env.get("DMLC_TASK_ID", "-1"))):
                    found.append(int(entry.name))
        return found

    def wait(self, timeout: float = LONG) -> int:
        """Return the exit code. If the job does not end in time, fail with its output, and where its processes were."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout)
        for pids in (self.members(), [self.process.pid]):  # launch.py last, which passes on what the others write
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)  # faulthandler writes the stacks of all threads
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(PROMPT / 2)
        pytest.fail(f"the job has not ended within {timeout:g} s:\n{self.output}", pytrace=False)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        until(condition, what, over=lambda: None if self.process.poll() is None else self.output)

    def said(self, text: str) -> Callable[[], bool]:
        return lambda: text in self.output


# Starts the processes that it is told of, by their words and environments, and ends with the worst of their exit codes.
STARTER = """
import json, subprocess, sys
started = [subprocess.Popen(words, env=env) for words, env in json.load(sys.stdin)]
sys.exit(max(abs(process.wait()) for process in started))
"""


@contextlib.contextmanager
def job(
    tmp_path: Path,
    script: str,
    *,
    workers: int = 2,
    servers: int = 2,
    keys: bool = False,
    options: Sequence[str] = (),
    **env: str,
) -> Iterator[Job]:
    """A job whose workers run ``script``; whatever happens, nothing of it is left.

    ``options`` are more of launch.py's. With ``keys`` its links go over TCP and are encrypted, as between hosts, and
    launch.py has no part in it.
    """
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    log = tmp_path / "log"
    words = [sys.executable, "-m", "launcher", "-n", f"{workers}", "-s", f"{servers}", *options, f"python {path}"]
    own = os.environ | FAST | {"TEST_MARK": mark, "PYTHONFAULTHANDLER": "1"} | env
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", STARTER] if keys else words,
            env=own,
            stdin=subprocess.PIPE if keys else None,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
        )
        running = Job(process, mark, log)
        try:
            if process.stdin is not None:
                json.dump(_processes(str(path), workers, servers, own), process.stdin)
                process.stdin.close()
            yield running
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(PROMPT)
            process.kill()
            process.wait()
            for pid in running.members():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _processes(script: str, workers: int, servers: int, env: dict[str, str]) -> list[tuple[list[str], dict[str, str]]]:
    """The words and the environments of a job's processes, with keys."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    contract = {"DMLC_NUM_WORKER": f"{workers}", "DMLC_NUM_SERVER": f"{servers}"}
    contract |= {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": f"{port}"}
    members = [("scheduler", 0)]
    members += [("server", rank) for rank in range(servers)] + [("worker", rank) for rank in range(workers)]
    found = []
    for (role, rank), own in zip(members, variables(len(members)), strict=True):
        words = [sys.executable, script] if role == "worker" else [sys.executable, "-m", "servers"]
        found.append((words, env | contract | own | {"DMLC_ROLE": role, "DMLC_TASK_ID": f"{rank}"}))
    return found
