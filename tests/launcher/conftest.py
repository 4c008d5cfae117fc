"""Real jobs with a stand-in for the servers, and ways to see what they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from cluster.hosts import Hosts
from launched import DRIVER, HASTE, WAITS, Launched, launch
from sites import Site

from launcher.processes.guard import Guard


@pytest.fixture
def short() -> Iterator[Path]:
    """A temporary directory with a name short enough for sockets in it; pytest's are long."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture
def guard(short: Path) -> Iterator[Guard]:
    made = Guard(short, f"test-{os.getpid()}-{short.name}")
    yield made
    made.kill()
    made.dismiss()


@pytest.fixture
def shadowed(tmp_path: Path) -> Path:
    """A directory of a user who calls things as we do."""
    for name in ("launcher", "kvstore", "msgpack", "json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('shadowed')\n")
    return tmp_path


@pytest.fixture(autouse=True)
def _none_ignored(none_ignored: None) -> None:
    """launch.py would leave ignored what was ignored at its start."""


@pytest.fixture
def start(tmp_path: Path, short: Path) -> Iterator[Callable[..., Launched]]:
    """Start launch.py with these words, in tmp_path, with `short` as TMPDIR."""
    started: list[Launched] = []

    def start(
        *argv: str,
        server: str = WAITS,
        limits: Mapping[str, float] = HASTE,
        prelude: str = "",
        env: dict[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> Launched:
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "KVSTORE_", "OMP_NUM"))
        }
        environ |= {"TMPDIR": str(short), "FAKE_SERVER": server, "LIMITS": json.dumps(dict(limits)), **(env or {})}
        command = [sys.executable, "-c", f"{prelude}\n{DRIVER}", *argv]
        directory, token = tmp_path / f"launch-{len(started)}", uuid.uuid4().hex
        process = launch(command, environ, token, tmp_path, directory, stdin=stdin, stdout=stdout, stderr=stderr)
        started.append(Launched(process, directory, token))
        return started[-1]

    yield start
    for launched in started:
        launched.end()


@pytest.fixture
def over_ssh(hosts: Hosts, tmp_path: Path) -> Iterator[Site]:
    """Jobs on four hosts by ssh; which hosts, the test says by `-H`."""
    site = Site("ssh", ("--launcher", "ssh"), hosts.launcher_env, hosts, tmp_path)
    yield site
    site.close()
