"""Real jobs with a stand-in for the servers, and ways to see what they leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

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


def _until(condition: Callable[[], Any], timeout: float = 15) -> Any:
    """Wait for a condition to hold; a test's only way to wait."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return value


@pytest.fixture
def until() -> Callable[..., Any]:
    return _until


@pytest.fixture
def short() -> Iterator[Path]:
    """A temporary directory with a name short enough for sockets in it; pytest's are long."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture
def start(tmp_path: Path, short: Path) -> Iterator[Callable[..., Launched]]:
    """Start launch.py with these words, in tmp_path, with `short` as TMPDIR."""
    started: list[Launched] = []

    def start(
        *argv: str,
        server: str = WAITS,
        haste: bool = True,
        prelude: str = "",
        env: dict[str, str] | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> Launched:
        directory = tmp_path / f"launch-{len(started)}"
        directory.mkdir()
        token = uuid.uuid4().hex
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "KVSTORE_", "OMP_NUM"))
        }
        environ |= {
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(short),
            "TEST_TOKEN": token,
            "FAKE_SERVER": server,
            "HASTE": "1" if haste else "",
            **(env or {}),
        }
        with (directory / "out").open("wb") as out, (directory / "err").open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-c", f"{prelude}\n{DRIVER}", *argv],
                cwd=tmp_path,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=out if stdout is None else stdout,
                stderr=err if stderr is None else stderr,
                start_new_session=True,
            )
        started.append(Launched(process, directory, token))
        return started[-1]

    yield start
    for launched in started:
        launched.process.kill()
        launched.process.wait()
        for pid in launched.family():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
