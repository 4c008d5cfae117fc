from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvstore.job.exit_report import MAX_DETAILS, MAX_TEXT, ExitReport, ReportFile, hand_over

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
