"""Options of what shows a running job."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.cli import parse
from launcher.errors import LaunchError


@pytest.mark.parametrize(
    ("words", "port", "command"),
    [
        (["--dashboard", "python", "train.py"], 0, ("python", "train.py")),
        (["--dashboard", "8080", "python", "train.py"], 8080, ("python", "train.py")),
        (["--dashboard=8080", "python", "train.py"], 8080, ("python", "train.py")),
        (["--dashboard", "-s", "1", "./train"], 0, ("./train",)),
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
        parse(["-n", "1", f"--dashboard={port}", "./train"], {})


def test_the_file_of_the_token_is_absolute() -> None:
    job = parse(["-n", "1", "--dashboard-token-file", "t", "./train"], {}).job
    assert str(job.cluster.dashboard_token_file).startswith("/")
    assert parse(["-n", "1", "./train"], {}).job.cluster.dashboard_token_file is None


@pytest.mark.parametrize(
    ("given", "name", "rounds"),
    [
        ("t.json", "t.json", "1-100"),
        ("t.json:20", "t.json", "1-20"),
        ("t.json:500-600", "t.json", "500-600"),
        ("a:b.json", "a:b.json", "1-100"),
        ("a:b.json:7", "a:b.json", "1-7"),
    ],
)
def test_a_trace_is_a_file_and_perhaps_its_rounds(given: str, name: str, rounds: str) -> None:
    job = parse(["-n", "1", "--trace", given, "./train"], {}).job
    assert job.cluster.trace == f"{Path(name).absolute()}:{rounds}"


@pytest.mark.parametrize(
    ("given", "said"),
    [("t.json:0", "'0' is not valid"), ("t.json:9-8", "'9-8' is not valid"), (":7", "no file"), (".", "directory")],
)
def test_a_trace_without_a_file_or_rounds_is_refused(given: str, said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        parse(["-n", "1", "--trace", given, "./train"], {})
