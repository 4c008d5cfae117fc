"""Starts real jobs with launch.py and looks at their processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from proc import state
from waiting import LONG, PROMPT, until

FAST = {"KVSTORE_HEARTBEAT_S": "0.2", "KVSTORE_HEARTBEAT_TIMEOUT_S": f"{PROMPT:g}"}


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
                if role in (None, env["DMLC_ROLE"]) and rank in (None, int(env["DMLC_TASK_ID"])):
                    found.append(int(entry.name))
        return found

    def wait(self, timeout: float = LONG) -> int:
        return self.process.wait(timeout)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for something that comes while the job runs."""
        until(condition, what, over=lambda: None if self.process.poll() is None else self.output)

    def said(self, text: str) -> Callable[[], bool]:
        return lambda: text in self.output


@contextlib.contextmanager
def job(tmp_path: Path, script: str, *, workers: int = 2, servers: int = 2, **env: str) -> Iterator[Job]:
    """A job whose workers run ``script``; whatever happens, nothing of it is left."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    log = tmp_path / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "launcher", "-n", f"{workers}", "-s", f"{servers}", f"python {path}"],
            env=os.environ | FAST | {"TEST_MARK": mark} | env,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
        )
        running = Job(process, mark, log)
        try:
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
