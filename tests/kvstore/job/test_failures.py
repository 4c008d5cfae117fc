"""What a process says of its failure: the report that it leaves, and the frames of its traceback."""

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

from kvstore.errors import ConfigError, Mismatch, NodeLost
from kvstore.job import tracebacks
from kvstore.job.exit_report import (
    MAX_DETAILS,
    MAX_TEXT,
    ExitReport,
    ReportFile,
    hand_over,
    note_joined,
    report_consequence,
    require_own,
)
from kvstore.job.tracebacks import chain, place, shortened

# ---- exit report


REPORT = ExitReport("ValueError: no data", "train.py:13, in step", "Traceback ...\n")


def test_a_report_goes_through_a_file() -> None:
    assert ExitReport.loads(REPORT.dumps()) == REPORT


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        REPORT.dumps()[:-5],
        json.dumps({**json.loads(REPORT.dumps()), "more": 1}).encode(),
        json.dumps({**json.loads(REPORT.dumps()), "error": 7}).encode(),
    ],
)
def test_anything_else_is_no_report(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (of json, of text, or ours)
        ExitReport.loads(data)
    file = ReportFile(tmp_path / "report", 0, 0)
    file.path.write_bytes(data)
    assert file.read() is None


def test_texts_fit_into_a_message() -> None:
    report = ExitReport("e" * 9999, "p" * 9999, "begin" + "d" * 2 * MAX_DETAILS + "end")
    assert len(report.error) <= MAX_TEXT
    assert len(report.place) <= MAX_TEXT
    assert len(report.details) <= MAX_DETAILS
    assert (report.details[:5], report.details[-3:]) == ("begin", "end")
    assert ExitReport("caf\xe9 \udcff").error == "caf\xe9 \\udcff"


def test_a_process_learns_of_its_file_by_a_variable(tmp_path: Path) -> None:
    file = ReportFile.of(tmp_path / "a:b", 2)
    assert ReportFile.from_env(file.variables) == file
    assert file.is_stderr()
    assert file.read() is None
    for text in ("", "1:2", "1:2:", "x:2:/path", "/path"):
        assert ReportFile.from_env({"KVSTORE_EXIT_REPORT": text}) is None


def test_the_last_report_counts(tmp_path: Path) -> None:
    file = ReportFile.of(tmp_path / "report", 2)
    assert hand_over(REPORT, file.variables)
    other = ExitReport("another")
    assert hand_over(other, file.variables)
    assert file.read() == other
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_what_a_process_must_print_itself(tmp_path: Path) -> None:
    file = ReportFile.of(tmp_path / "report", 2)
    printed = ExitReport(REPORT.error, REPORT.place, printed=True)
    assert not hand_over(REPORT, {})  # there is no supervisor
    assert not hand_over(REPORT, file.variables | {"KVSTORE_VERBOSE": "1"})
    assert file.read() == printed
    read, write = os.pipe()
    elsewhere = ReportFile.of(tmp_path / "elsewhere", write)  # as after `2> file` in the command
    os.close(read)
    os.close(write)
    assert not hand_over(REPORT, elsewhere.variables)
    assert elsewhere.read() == printed
    assert not hand_over(REPORT, ReportFile.of(tmp_path / "gone" / "report", 2).variables)
    assert not hand_over(REPORT, ReportFile.of(tmp_path / "bad", 2).variables | {"KVSTORE_VERBOSE": "perhaps"})


# ---- whose it is


IN_ANOTHER = """
import os, sys
from kvstore.errors import ConfigError
from kvstore.job.exit_report import ExitReport, hand_over, note_joined, require_own

try:
    require_own(os.environ, "worker 0")
except ConfigError as exc:
    print(exc)
    print(hand_over(ExitReport("mine"), os.environ))
else:
    print("it is the worker")
    if sys.argv[1] == "joins":
        note_joined(os.environ)
"""


def in_another_process(file: ReportFile, what: str = "") -> str:
    argv = [sys.executable, "-c", IN_ANOTHER, what]
    done = subprocess.run(argv, env={**os.environ, **file.variables}, capture_output=True, text=True, check=True)
    return done.stdout


def test_a_process_beside_the_worker_is_told_at_once_and_reports_nothing(tmp_path: Path) -> None:
    file = ReportFile.of(tmp_path / "report-0", 2)
    require_own(file.variables, "worker 0")
    said = in_another_process(file)
    assert said.startswith(f"worker 0 of this job is process {os.getpid()} already, and this is process ")
    assert "remove the variables that begin with DMLC_ and KVSTORE_" in said
    assert said.endswith("False\n")
    assert file.read() is None
    hand_over(ExitReport("the worker's"), file.variables)
    assert file.read() is not None


def test_a_process_after_the_worker_is_told_too_but_not_after_one_that_never_joined(tmp_path: Path) -> None:
    file = ReportFile.of(tmp_path / "report-0", 2)
    assert in_another_process(file) == "it is the worker\n"
    assert in_another_process(file, "joins") == "it is the worker\n"
    said = in_another_process(file)
    assert said.startswith("worker 0 of this job was process ")
    assert "which has ended" in said
    with pytest.raises(ConfigError, match="one process for each worker"):
        require_own(file.variables, "worker 0")


def test_without_a_supervisor_any_process_may_be_the_worker() -> None:
    require_own({}, "worker 0")


def test_where_no_launcher_gives_a_file_what_a_worker_starts_knows_it_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env: dict[str, str] = {}
    note_joined(env, "1 of 2 at host:7")
    for rank in ("1 of 2 at host:7", "0 of 2 at host:7", ""):
        require_own(env, "worker 1", rank)  # the worker itself, in whatever job
    me = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: me + 1)
    require_own(env, "worker 0", "0 of 2 at host:9")  # of a job that the worker has started
    with pytest.raises(ConfigError, match=f"worker 1 of this job is process {me} already, and this is"):
        require_own(env, "worker 1", "1 of 2 at host:7")


def test_without_a_supervisor_the_log_is_told(caplog: pytest.LogCaptureFixture):
    report_consequence("server 0 ends", "worker 1 is lost")
    assert caplog.messages == ["server 0 ends: worker 1 is lost"]


def test_a_supervisor_that_reads_standard_error_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    file = ReportFile.of(tmp_path / "report", 2)
    monkeypatch.setattr(os, "environ", file.variables)
    report_consequence("server 0 ends", "worker 1 is lost")
    report = file.read()
    assert report is not None
    assert (report.error, report.consequence) == ("worker 1 is lost", True)
    assert caplog.messages == []


# ---- which frames are shown. A user's code calls ours, which calls back, or raises


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
