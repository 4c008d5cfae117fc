"""A process beside a job."""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections.abc import Callable

import pytest

from kvstore.job.exit_report import ExitReport
from kvstore.job.exits import Exit
from launcher.processes.companion import Companion, CompanionProgram
from launcher.supervision.crew import turn


class Said:
    """Takes what a companion says; it reports nothing else."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.secrets: list[str] = []

    def say(self, text: str, *, secret: bool = False) -> None:
        self.lines.append(text)
        if secret:
            self.secrets.append(text)

    def output(self, index: int, number: int, data: bytes) -> None:
        raise AssertionError("it is no task")

    def reported(self, index: int, report: ExitReport) -> None:
        raise AssertionError("it is no task")

    def exited(self, index: int, how: Exit) -> None:
        raise AssertionError("it is no task")


class Beside:
    """A companion that runs a Python program."""

    def __init__(self, program: str, grace_s: float = 10.0, python: str = sys.executable) -> None:
        self.said = Said()
        self.selector = selectors.DefaultSelector()
        made = CompanionProgram("dashboard", (python, "-c", program), dict(os.environ), grace_s=grace_s)
        self.companion = Companion(made, ["here it is"])
        self.companion.start(self.selector, self.said)

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not done():
            assert time.monotonic() < deadline, self.said.lines
            turn(self.selector, 0.02)
            self.companion.collect()

    def close(self) -> list[str]:
        self.companion.close()
        self.companion.close()
        assert not self.selector.get_map()
        return self.said.lines


def test_it_ends_when_its_input_does_and_its_lines_are_said() -> None:
    beside = Beside("import sys; print('hello', flush=True); sys.stdin.read(); print('bye'); sys.exit(3)")
    beside.until(lambda: "hello" in beside.said.lines)
    assert not beside.companion.leftovers()
    beside.companion.signal(signal.SIGKILL)  # is for members
    assert not beside.companion.signal_task(0, signal.SIGKILL)
    lines = beside.close()
    assert beside.said.secrets == ["here it is"], "an address with its token goes into no log file"
    assert lines[:3] == ["here it is", "hello", "bye"]
    assert lines[3:] == ["the dashboard is gone: it exited with code 3; the job goes on without it"]


def test_its_death_is_one_line() -> None:
    beside = Beside("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    beside.until(lambda: len(beside.said.lines) > 1)
    assert beside.close()[1:] == ["the dashboard is gone: it was killed by SIGKILL; the job goes on without it"]


def test_who_ends_in_order_is_not_mentioned() -> None:
    beside = Beside("pass")
    beside.until(lambda: len(beside.selector.get_map()) == 0)
    assert beside.close() == ["here it is"]


def test_who_does_not_end_in_time_is_killed() -> None:
    beside = Beside("import time; print('up', flush=True); time.sleep(600)", grace_s=0.1)
    beside.until(lambda: "up" in beside.said.lines)
    assert beside.close() == ["here it is", "up"]


@pytest.mark.parametrize("python", ["/nowhere/python", "/etc/passwd"])
def test_what_cannot_be_started_does_not_keep_the_job_from_it(python: str) -> None:
    beside = Beside("pass", python=python)
    lines = beside.close()
    assert len(lines) == 2
    assert lines[1].startswith("cannot start dashboard")
    assert lines[1].endswith("the job goes on without it")
