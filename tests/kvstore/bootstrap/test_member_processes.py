"""Processes that a rank starts through their supervisor: what is left if that cannot be started, or waited for."""

from __future__ import annotations

import io
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvstore.bootstrap.member_processes import MemberProcesses
from kvstore.bootstrap.server_supervisor import SupervisedProcess
from kvstore.job.config import Config

AGGREGATOR = SupervisedProcess("aggregator", 1, ["python"], {})


class Deaf:
    """Stands for a supervisor's process that ends only when it is killed."""

    def __init__(self) -> None:
        self.stdin = io.BytesIO()
        self.told: list[str] = []

    def wait(self, timeout: float | None = None) -> int:
        self.told.append("wait")
        if timeout is not None and "kill" not in self.told:
            raise subprocess.TimeoutExpired("python", timeout)
        return 0

    def terminate(self) -> None:
        self.told.append("terminate")

    def kill(self) -> None:
        self.told.append("kill")


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> Deaf:
    supervisor = Deaf()
    monkeypatch.setattr(subprocess, "Popen", lambda *_words, **_options: supervisor)
    return supervisor


def made(directory: Path) -> MemberProcesses:
    directory.mkdir()
    return MemberProcesses(Config(), 3, [AGGREGATOR], {}, str(directory))


def test_a_supervisor_that_cannot_be_started_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_words: Any, **_options: Any) -> Any:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(OSError, match="temporarily unavailable"):
        made(tmp_path / "job")
    assert list(tmp_path.iterdir()) == []


def test_a_supervisor_that_does_not_end_is_killed(deaf: Deaf, tmp_path: Path) -> None:
    made(tmp_path / "job").end()
    assert deaf.told == ["terminate", "wait", "kill", "wait"]
    assert list(tmp_path.iterdir()) == []


def test_a_fork_of_the_rank_has_no_supervisor_to_wait_for(
    deaf: Deaf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes, pid = made(tmp_path / "job"), os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    processes.wait()
    assert deaf.told == []
    monkeypatch.undo()
    assert (tmp_path / "job").exists()
