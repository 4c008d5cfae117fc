"""Which frames are shown. A user's code calls ours, which calls back, or raises."""

from __future__ import annotations

import json
import linecache
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import LONG

from kvstore.errors import Mismatch, NodeLost
from kvstore.job import tracebacks
from kvstore.job.exit_report import ExitReport, ReportFile
from kvstore.job.tracebacks import chain, place, shortened

OURS, LIBRARY = tracebacks.__file__.replace("tracebacks", "not_there"), json.__file__


def function(name: str, filename: str, body: str, **names: object) -> Callable[[], None]:
    """A function as if it stood in that file."""
    source = f"def {name}():\n    {body}\n"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    exec(compile(source, filename, "exec"), names)
    return names[name]  # type: ignore[return-value]


def caught(call: Callable[[], None]) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)  # without this function
    raise AssertionError


def names(text: str) -> list[str]:
    return [line.rpartition(" in ")[2] for line in text.splitlines() if line.startswith("  File ")]


def test_an_error_of_ours_ends_in_the_users_line() -> None:
    check = function("check", OURS, "raise Mismatch('wrong shape')", Mismatch=Mismatch)
    backward = function("backward", LIBRARY, "check()", check=check)
    step = function("step", "train.py", "backward()", backward=backward)
    error = caught(function("main", "train.py", "step()", step=step))
    text = shortened(error)
    assert names(text) == ["main", "step"]
    assert text.splitlines()[-1] == "kvstore.errors.Mismatch: wrong shape"
    assert text.startswith(
        "Traceback (most recent call last; 2 frames of the library are left out, --verbose shows all):\n"
    )
    assert place(error) == "train.py:2, in step"


def test_packages_that_lie_elsewhere_are_not_the_users() -> None:
    check = function("check", OURS, "raise Mismatch('wrong shape')", Mismatch=Mismatch)
    backward = function("backward", "/home/me/.local/lib/python3.12/site-packages/torch/x.py", "check()", check=check)
    error = caught(function("main", "train.py", "backward()", backward=backward))
    assert names(shortened(error)) == ["main"]
    assert place(error) == "train.py:2, in main"


def test_between_the_users_lines_ours_are_left_out() -> None:
    loss = function("loss", "train.py", "1 / 0")
    fit = function("fit", OURS, "loss()", loss=loss)
    error = caught(function("main", "train.py", "fit()", fit=fit))
    assert names(shortened(error)) == ["main", "loss"]
    assert "1 frame of the library is left out" in shortened(error)


def test_an_error_of_the_users_own_is_as_python_prints_it() -> None:
    dumps = function("dumps", LIBRARY, "raise TypeError('no JSON')")
    error = caught(function("main", "train.py", "dumps()", dumps=dumps))
    assert names(shortened(error)) == ["main", "dumps"]
    assert shortened(error).startswith("Traceback (most recent call last):\n")


def test_a_defect_of_ours_is_shown_whole() -> None:
    deep = function("deep", OURS, "raise KeyError(3)")
    push = function("push", OURS, "deep()", deep=deep)
    error = caught(function("main", "train.py", "push()", push=push))
    assert names(shortened(error)) == ["main", "push", "deep"]


def test_without_a_line_of_the_users_nothing_is_left_out() -> None:
    error = caught(function("serve", OURS, "raise NodeLost('gone')", NodeLost=NodeLost))
    assert names(shortened(error)) == ["serve"]
    assert place(error) == ""


def test_how_we_found_out_is_not_the_users_business() -> None:
    inner = function("inner", OURS, "{}['w']")
    body = "try: inner()\n    except KeyError: raise Mismatch('no such key')"
    check = function("check", OURS, body, inner=inner, Mismatch=Mismatch)
    error = caught(function("main", "train.py", "check()", check=check))
    text = shortened(error)
    assert names(text) == ["main"]
    assert "KeyError" not in text
    assert [type(one) for one in chain(error)] == [Mismatch, KeyError]


def test_a_cause_is_shortened_too() -> None:
    check = function("check", OURS, "raise Mismatch('wrong shape')", Mismatch=Mismatch)
    body = "try: check()\n    except ValueError as error: raise RuntimeError('giving up') from error"
    error = caught(function("main", "train.py", body, check=check))
    text = shortened(error)
    assert names(text) == ["main", "main"]
    assert "direct cause" in text
    assert text.index("1 frame of the library") > text.index("direct cause")
    assert text.endswith("RuntimeError: giving up\n")


def test_errors_may_go_in_circles() -> None:
    first, second = ValueError("one"), ValueError("two")
    first.__context__, second.__context__ = second, first
    assert set(chain(first)) == {first, second}
    assert shortened(first).endswith("ValueError: one\n")


@pytest.mark.parametrize("notes", [[], ["look at the data"]])
def test_notes_stay(notes: list[str]) -> None:
    error = caught(function("main", "train.py", "raise ValueError('no')"))
    if not hasattr(error, "add_note"):
        pytest.skip("Python 3.10 has no notes")
    for note in notes:
        error.add_note(note)
    assert shortened(error).splitlines()[-1 - len(notes) :] == ["ValueError: no", *notes]


ROOT = Path(__file__).resolve().parents[3]

FAILS = "from kvstore.job import tracebacks\ntracebacks.install_excepthook()\n1 / 0\n"
FOLLOWS = """
from kvstore.errors import NodeLost
from kvstore.job import tracebacks
tracebacks.install_excepthook()
try:
    raise NodeLost("worker 1 exited with code 7")
except NodeLost:
    raise RuntimeError("training has failed")
"""
OWN_HOOK = "import sys\nsys.excepthook = lambda *_: print('mine', file=sys.stderr)\n" + FAILS
OWN_HOOK_LATER = FAILS.replace("1 / 0", OWN_HOOK.split("\n")[0] + "\n" + OWN_HOOK.split("\n")[1] + "\n1 / 0")
FORKS = """
import os, sys
from kvstore.job import tracebacks
tracebacks.install_excepthook()
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
