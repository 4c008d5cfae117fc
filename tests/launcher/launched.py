"""A launch.py that runs on this machine: how tests start it, and what they see of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# launch.py with other servers and, mostly, more haste.
DRIVER = """
import dataclasses, os, sys
from launcher import cli
from launcher.kinds import local
from launcher.ending import Limits
from launcher.errors import LaunchError
from launcher.kinds.kind import Kind
from launcher.launch import main
import launcher.launch as entry

def run(job, on_failure):
    job = dataclasses.replace(job, server_argv=(sys.executable, "-S", "-c", os.environ["FAKE_SERVER"]))
    limits = Limits(window=0.3, linger=0.1, patience=0.3) if os.environ["HASTE"] else None
    return local.run(job, on_failure, limits=limits)

def on_failure(task, how):
    if note := os.environ.get("NOTE_FAILURE"):
        open(note, "a").write(f"{task.name} {how} {task.env['DMLC_PS_ROOT_URI']}\\n")
    if os.environ.get("FAIL_TO_TELL"):
        raise OSError("nobody home")

entry.find = lambda kind, job: Kind(run, local.dry_run, frozenset())
sys.exit(main(on_failure=on_failure))
"""

WAITS = "import signal; signal.pause()"


class Launched:
    """A running launch.py: its output, and every process that descends from it."""

    def __init__(self, process: subprocess.Popen[bytes], directory: Path, token: str) -> None:
        self.process = process
        self._directory = directory
        self._token = f"TEST_TOKEN={token}".encode()

    @property
    def out(self) -> str:
        return (self._directory / "out").read_bytes().decode(errors="replace")

    @property
    def err(self) -> str:
        return (self._directory / "err").read_bytes().decode(errors="replace")

    @property
    def lines(self) -> list[str]:
        return sorted(self.out.splitlines())

    def wait(self, timeout: float = 20) -> int:
        return self.process.wait(timeout)

    def kill(self, signum: int) -> None:
        os.kill(self.process.pid, signum)

    def family(self) -> dict[int, str]:
        """Everything alive that was started with our token: pid -> command line."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    if self._token in (entry / "environ").read_bytes().split(b"\0"):
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                except OSError:
                    continue
        return found

    def pid_of(self, *words: str) -> int:
        (pid,) = (pid for pid, line in self.family().items() if all(word in line for word in words))
        return pid
