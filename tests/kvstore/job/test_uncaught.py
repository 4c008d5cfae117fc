"""What a process that fails prints, and what it tells its supervisor, by scripts that fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import LONG

from kvstore.job.exit_report import ExitReport, ReportFile

ROOT = Path(__file__).resolve().parents[3]

FAILS = "from kvstore.job import uncaught\nuncaught.install()\n1 / 0\n"
FOLLOWS = """
from kvstore.errors import NodeLost
from kvstore.job import uncaught
uncaught.install()
try:
    raise NodeLost("worker 1 exited with code 7")
except NodeLost:
    raise RuntimeError("training has failed")
"""
OWN_HOOK = "import sys\nsys.excepthook = lambda *_: print('mine', file=sys.stderr)\n" + FAILS
OWN_HOOK_LATER = FAILS.replace("1 / 0", OWN_HOOK.split("\n")[0] + "\n" + OWN_HOOK.split("\n")[1] + "\n1 / 0")
FORKS = """
import os, sys
from kvstore.job import uncaught
uncaught.install()
pid = os.fork()
if pid == 0:
    1 / 0
sys.exit(os.waitpid(pid, 0)[1] == 0)
"""


def run(tmp_path: Path, script: str, *, supervised: bool, **env: str) -> tuple[str, ExitReport | None]:
    """What a script writes to standard error, and its report. Its supervisor, if it has one, reads that."""
    path = tmp_path / "script.py"
    path.write_text(script)
    read, write = os.pipe()
    file = ReportFile.of(tmp_path / "report", write)
    words = [sys.executable, str(path)]
    env = {"PYTHONPATH": str(ROOT), **env, **(file.variables if supervised else {})}
    with os.fdopen(read) as pipe:
        process = subprocess.Popen(words, cwd=tmp_path, env=env, stderr=write)
        os.close(write)
        printed = pipe.read()
    process.wait(LONG)
    return printed, file.read()


def test_a_supervisor_is_told_instead_of_standard_error(tmp_path: Path) -> None:
    printed, report = run(tmp_path, FAILS, supervised=True)
    assert printed == ""
    assert report is not None
    assert (report.error, report.place) == ("ZeroDivisionError: division by zero", "script.py:3")
    assert report.details.startswith("Traceback (most recent call last):\n")
    assert report.details.endswith("ZeroDivisionError: division by zero\n")
    assert (report.consequence, report.printed) == (False, False)


def test_a_consequence_says_so(tmp_path: Path) -> None:
    printed, report = run(tmp_path, FOLLOWS, supervised=True)
    assert printed == ""
    assert report is not None
    assert report.consequence
    assert "worker 1 exited with code 7" in report.details


def test_without_a_supervisor_a_cause_is_printed_in_full_and_a_consequence_in_a_line(tmp_path: Path) -> None:
    printed, report = run(tmp_path, FAILS, supervised=False)
    assert printed.startswith("Traceback (most recent call last):\n")
    assert report is None
    printed, _ = run(tmp_path, FOLLOWS, supervised=False)
    assert printed == "RuntimeError: training has failed (at script.py:8)\n"


def test_without_a_supervisor_ctrl_c_is_a_line_too(tmp_path: Path) -> None:
    printed, _ = run(tmp_path, FAILS.replace("1 / 0", "raise KeyboardInterrupt"), supervised=False)
    assert printed == "KeyboardInterrupt (at script.py:3)\n"


def test_verbose_processes_print_for_themselves(tmp_path: Path) -> None:
    printed, report = run(tmp_path, FOLLOWS, supervised=True, KVSTORE_VERBOSE="1")
    assert printed.count("Traceback (most recent call last):\n") == 2
    assert report is not None
    assert (report.printed, report.details) == (True, "")


@pytest.mark.parametrize("script", [OWN_HOOK, OWN_HOOK_LATER])
def test_a_hook_of_the_users_own_stays(tmp_path: Path, script: str) -> None:
    assert run(tmp_path, script, supervised=True) == ("mine\n", None)


def test_a_fork_is_no_member(tmp_path: Path) -> None:
    printed, report = run(tmp_path, FORKS, supervised=True)
    assert printed.endswith("ZeroDivisionError: division by zero\n")
    assert report is None
