"""Options of what shows a running job."""

from __future__ import annotations

import pytest

from launcher.cli import parse
from launcher.errors import LaunchError


@pytest.mark.parametrize(
    ("words", "port", "command"),
    [
        (["--dashboard", "python", "train.py"], 0, ("python", "train.py")),
        (["--dashboard", "8080", "python", "train.py"], 8080, ("python", "train.py")),
        (["--dashboard=8080", "python", "train.py"], 8080, ("python", "train.py")),
        (["--dashboard", "-s", "1", "python"], 0, ("python",)),
        (["python", "train.py", "--dashboard"], None, ("python", "train.py", "--dashboard")),
        (["python", "train.py", "--dashboard", "x"], None, ("python", "train.py", "--dashboard", "x")),
        (["--dashboard", "--", "python", "--dashboard"], 0, ("python", "--dashboard")),
    ],
)
def test_a_dashboard_has_a_port_or_any(words: list[str], port: int | None, command: tuple[str, ...]) -> None:
    job = parse(["-n", "1", *words], {}).job
    assert (job.cluster.dashboard, job.command) == (port, command)


@pytest.mark.parametrize("port", ["0", "65536", "x", "", "999999999"])
def test_what_is_no_port_is_refused(port: str) -> None:
    with pytest.raises(LaunchError, match="not a port"):
        parse(["-n", "1", f"--dashboard={port}", "python"], {})


def test_the_file_of_the_token_is_absolute() -> None:
    job = parse(["-n", "1", "--dashboard-token-file", "t", "python"], {}).job
    assert str(job.cluster.dashboard_token_file).startswith("/")
    assert parse(["-n", "1", "python"], {}).job.cluster.dashboard_token_file is None
