"""launch.py's side of the keeper."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.processes.guard import Guard
from launcher.processes.jobdir import JobDir


@contextmanager
def no_more_files() -> Iterator[None]:
    """None may be opened: strangers at a port of launch.py's, say, have taken what there were."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere nobody looks")
def test_where_no_file_can_be_opened_all_that_is_known_goes_and_the_rest_is_told(
    short: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = JobDir.make(short)
    guard = Guard(job.path, job.path.name)
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        guard.add(process.pid)
        with no_more_files():
            assert not guard.leftovers()
            guard.kill()
            job.remove()
        assert process.wait() == -9
    guard.dismiss()
    said = "launch.py: cannot see whether processes of the job are left: Too many open files\n"
    assert capfd.readouterr().err == said
    job.remove()
    assert list(short.iterdir()) == []
