"""Lines of a training: seen without a set-up of logging, and records of the root logger with one."""

from __future__ import annotations

import logging

import pytest

from workers.common.run_log import log_line


def test_without_a_set_up_of_logging_rank_0_is_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as a program finds it
    for rank in (0, 1):
        log_line(rank, "Epoch[%d] Train-%s=%f", rank, "accuracy", 0.5)
    assert tuple(capsys.readouterr()) == ("", "Epoch[0] Train-accuracy=0.500000\n")
    assert not logging.getLogger().handlers
    monkeypatch.setattr(logging.getLogger().manager, "disable", logging.INFO)  # as by logging.disable
    log_line(0, "not wanted")
    assert capsys.readouterr().err == ""


def test_with_one_lines_are_records_of_the_root_logger(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    log_line(0, "below the level of the root logger")
    caplog.set_level(logging.INFO)
    log_line(1, "Epoch[%d] Time cost=%.3f", 1, 2.0)
    (record,) = caplog.records
    assert (record.name, record.levelname, record.getMessage()) == ("root", "INFO", "Epoch[1] Time cost=2.000")
    assert record.filename == "test_run_log.py"
    assert capsys.readouterr().err == ""
