from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest

from launcher.errors import LaunchError
from launcher.processes.machine import require_files


@pytest.fixture
def limit() -> Iterator[int]:
    """At most 200 open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    yield 200
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def printed(code: str, **options: object) -> str:
    return subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def test_more_files_than_are_allowed_is_an_error_that_says_how_many_would_do(limit: int) -> None:
    require_files(136)
    with pytest.raises(LaunchError, match=r"needs 201 open files, but 200 are allowed; raise that: ulimit -n 201"):
        require_files(137)


def test_a_standard_stream_that_is_closed_is_opened() -> None:
    code = (
        "import os, launcher.processes.machine as m; os.close(0); os.close(2); m.open_standard_streams();"
        "print(*(os.readlink(f'/proc/self/fd/{fd}') for fd in (0, 2)), os.pipe()[0] > 2)"
    )
    assert printed(code) == "/dev/null /dev/null True"
