from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from launcher.errors import LaunchError
from launcher.kinds.kind import mebibytes, require, seconds, tell


def test_a_program_on_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "qsub"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert require("sge", "qsub", "") == str(program)


def test_one_that_is_missing_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"sge needs qsub on PATH: run launch\.py on a submit host") as caught:
        require("sge", "qsub", "run launch.py on a submit host")
    assert caught.value.exit_code == 127


def test_a_command_is_run_in_a_session_of_its_own(tmp_path: Path) -> None:
    tell(["sh", "-c", f"ps -o sid= -p $$ >{tmp_path / 'session'}"])
    assert int((tmp_path / "session").read_text()) != os.getsid(0)


def test_nothing_comes_of_a_command_that_fails_or_is_missing_or_hangs() -> None:
    began = time.monotonic()
    tell(["false"])
    tell(["/nowhere/scancel"])
    tell(["sleep", "60"], 0.05)
    assert time.monotonic() < began + 30


@pytest.mark.parametrize(("size", "expected"), [("", 0), ("500m", 500), ("1m", 1), ("4g", 4096)])
def test_sizes(size: str, expected: int) -> None:
    assert mebibytes(size) == expected


@pytest.mark.parametrize(
    ("time", "expected"), [("2:00:00", 7200), ("30:00", 1800), ("0:01", 1), ("100:00:01", 360_001), ("1:2:03", 3723)]
)
def test_times(time: str, expected: int) -> None:
    assert seconds(time) == expected


@pytest.mark.parametrize("time", ["", "90", "0:00", "0:00:00", "1:2", "2h", "1-02:00:00", "-1:00", "²:00"])
def test_what_is_no_time_is_an_error_that_shows_one(time: str) -> None:
    with pytest.raises(LaunchError, match="2:00:00") as caught:
        seconds(time)
    assert f"--time {time}" in str(caught.value)
