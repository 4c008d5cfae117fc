"""Processes that a rank starts through their supervisor: what is left if that cannot be started, or waited for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvstore.bootstrap import member_processes
from kvstore.bootstrap.member_processes import MemberProcesses
from kvstore.bootstrap.server_supervisor import SupervisedProcess
from kvstore.job.config import Config

AGGREGATOR = SupervisedProcess("aggregator", 1, ["python"], {})


DEAF = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(1, b"%d\\n" % os.getpid())
time.sleep(1000)
"""


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor's process that ends only when it is killed."""
    monkeypatch.setattr(member_processes, "words", lambda python, _module: (python, "-S", "-c", DEAF))
    monkeypatch.setattr(member_processes, "END_S", 0.1)


def children() -> list[str]:
    return [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


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


@pytest.mark.usefixtures("deaf")
def test_a_supervisor_is_nobodys_child_and_one_that_does_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, pid = children(), os.getpid()
    processes = made(tmp_path / "job")
    assert children() == before
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    processes.wait()  # a fork of the rank has nobody to wait for
    monkeypatch.undo()
    assert (tmp_path / "job").exists()
    processes.end()
    processes.end()
    assert list(tmp_path.iterdir()) == []
