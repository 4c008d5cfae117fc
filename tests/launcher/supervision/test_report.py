from __future__ import annotations

from typing import Any

import pytest

from launcher.job.tasks import Task
from launcher.supervision import report as module
from launcher.supervision.actions import Lose
from launcher.supervision.report import prepare, report, report_loss

ENV = {"DMLC_PS_ROOT_URI": "ipc:///nowhere/scheduler"}


def test_the_scheduler_is_told_who_has_ended_and_how(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "tell", lambda *words: told.append(words))
    report(Task("server", 1, ("x",), ENV), "exited with code 7")
    assert told == [(ENV, "server", 1, "exited with code 7")]


def test_or_who_has_died_while_the_job_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "tell", lambda *words: told.append(words))
    for env in (ENV, {}):
        prepare(Task("standby", 1, ("x",), env))
    assert not report_loss(Task("standby", 1, ("x",), ENV), Lose(7, "was killed by SIGKILL", 3, False))
    assert told == [(ENV, "standby", 1, "was killed by SIGKILL", 3, False)]


def test_when_the_scheduler_itself_has_ended_nobody_is_told() -> None:
    report(Task("scheduler", 0, ("x",), {}), "was killed by SIGKILL")  # an environment that nobody could be told by
    assert report_loss(Task("scheduler", 0, ("x",), {}), Lose(0, "was killed by SIGKILL", 1, False))
