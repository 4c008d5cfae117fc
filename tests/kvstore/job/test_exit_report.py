from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
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
