"""A job's private directory."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from launcher.errors import LaunchError
from launcher.processes import keeper
from launcher.processes.jobdir import JobDir, sweep


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_it_is_private_and_goes(short: Path) -> None:
    job = JobDir.make(short)
    assert job.path.parent == short
    assert job.path.name.startswith(f"kvstore-{os.getuid()}-{os.getpid()}-")
    assert stat.S_IMODE(job.path.stat().st_mode) == 0o700
    assert len(bytes(job.path)) + 36 <= 103
    job.remove()
    job.remove()
    assert list(short.iterdir()) == []


def test_both_pythons_are_this_one(short: Path) -> None:
    job = JobDir.make(short)
    shims = job.shims(sys.executable)
    for name in ("python", "python3"):
        printed = subprocess.run(
            [shims / name, "-c", "import sys; print(sys.executable)"], capture_output=True, check=True
        )
        assert printed.stdout.decode().strip() == sys.executable
    job.remove()


def test_a_long_tmpdir_is_not_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    job = JobDir.make()
    assert job.path.parent == Path("/tmp")
    job.remove()


def test_no_place_is_an_error_that_says_what_would_do(short: Path) -> None:
    with pytest.raises(LaunchError, match=r"cannot make.*No such file.*set TMPDIR to a writable directory"):
        JobDir.make(short / "missing")


def test_what_dead_launchers_left_is_swept(short: Path, dead_pid: int) -> None:
    uid = os.getuid()
    left = short / f"kvstore-{uid}-{dead_pid}-abc"
    (left / "bin").mkdir(parents=True)
    (left / "lock").touch()
    bare = short / f"kvstore-{uid}-{dead_pid}-def"
    bare.mkdir()
    others = [
        short / f"kvstore-{uid}-{os.getpid()}-abc",  # alive
        short / f"kvstore-{uid + 1}-{dead_pid}-abc",  # somebody else's
        short / f"kvstore-{uid}-mine",
    ]
    for other in others:
        other.mkdir()
    link = short / f"kvstore-{uid}-{dead_pid}-link"
    link.symlink_to(others[2])
    assert sorted(sweep(short)) == [left, bare]
    assert sorted(short.iterdir()) == sorted([*others, link])


def test_a_locked_one_is_alive_whatever_its_pid_says(short: Path, dead_pid: int) -> None:
    path = short / f"kvstore-{os.getuid()}-{dead_pid}-container"
    path.mkdir()
    job = JobDir(path)
    assert sweep(short) == []
    job.remove()
    path.mkdir()
    assert sweep(short) == [path]


def test_the_memory_that_the_job_shared_goes_and_nobody_elses(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = short / "shm"
    shared.mkdir()
    monkeypatch.setattr(keeper, "SHARED", shared)
    job = JobDir.make(short)
    uid, name = os.getuid(), job.path.name
    ours = [f"kvstore-{uid}-{name}-{pid}-{'0' * 16}.{number}" for pid in (7, 77) for number in (0, 12)]
    others = [
        f"kvstore-{uid}-{name}x-7-{'0' * 16}.0",
        f"kvstore-{uid}-{name}-7-{'0' * 16}.0x",
        f"kvstore-{uid}-{name[:-1]}-7-{'0' * 16}.0",
        f"kvstore-{uid + 1}-{name}-7-{'0' * 16}.0",
        f"kvstore-{uid}-{name}-x-7-{'0' * 16}.0",
    ]
    for file in ours + others:
        (shared / file).touch()
    (shared / f"kvstore-{uid}-{name}-8-{'0' * 16}.0").mkdir()  # which cannot be unlinked, and stops nothing
    job.remove()
    assert sorted(path.name for path in shared.iterdir() if path.is_file()) == sorted(others)
