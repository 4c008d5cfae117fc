from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.job.exit_report import ReportFile
from servers.farewell import say


def test_without_a_supervisor_the_log_is_told(caplog: pytest.LogCaptureFixture):
    say("server 0 ends", "worker 1 is lost")
    assert caplog.messages == ["server 0 ends: worker 1 is lost"]


def test_a_supervisor_that_reads_standard_error_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    file = ReportFile.of(tmp_path / "report", 2)
    monkeypatch.setattr(os, "environ", file.variables)
    say("server 0 ends", "worker 1 is lost")
    report = file.read()
    assert report is not None
    assert (report.error, report.consequence) == ("worker 1 is lost", True)
    assert caplog.messages == []
