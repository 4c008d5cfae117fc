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
from cluster.hosts import Hosts
from launched import DRIVER, ROOT, WAITS, Launched
from sites import Site


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


@pytest.fixture
def over_ssh(hosts: Hosts, tmp_path: Path) -> Iterator[Site]:
    """Jobs on four hosts by ssh; which hosts, the test says by `-H`."""
    site = Site("ssh", ("--launcher", "ssh"), hosts.launcher_env, hosts, tmp_path)
    yield site
    site.close()
