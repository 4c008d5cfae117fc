"""A process beside a job."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.job.exit_report import ExitReport
from kvstore.job.processes import Exit
from launcher.errors import LaunchError
from launcher.job.description import Cluster, Job
from launcher.processes.child import Program
from launcher.processes.companion import WRITTEN_S, Companion, companions
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
        made = Program("dashboard", (python, "-c", program), dict(os.environ))
        self.companion = Companion(made, ["here it is"], grace_s=grace_s)
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


def job(port: int | None, token_file: Path | None = None) -> Job:
    file = None if token_file is None else str(token_file)
    return Job(1, 1, ("python", "train.py"), cluster=Cluster(dashboard=port, dashboard_token_file=file))


def test_without_a_dashboard_nothing_runs_beside_a_job(tmp_path: Path) -> None:
    with companions(job(None), tmp_path, {}) as beside:
        assert beside == []


def test_the_observer_is_told_where_the_job_is_and_is_none_of_its_members(tmp_path: Path) -> None:
    around = {
        "PATH": "/bin",
        "KVSTORE_JOB": "another",
        "DMLC_ROLE": "worker",
        "KVSTORE_AGENT": "agent",
        "SSH_CONNECTION": "a",
    }
    with companions(job(0), tmp_path, around) as beside:
        (companion,) = beside
        assert isinstance(companion, Companion)
        env = companion.program.env
        assert env["DMLC_ROLE"] == "observer"
        assert env["KVSTORE_OBSERVE"] == str(tmp_path / "observe.json")
        assert not {"KVSTORE_JOB", "KVSTORE_AGENT"} & set(env)
        address, way = companion.announcement
        token = env["KVSTORE_DASHBOARD_TOKEN"]
        assert address.endswith(f"/?token={token}")
        assert "ssh -N -L" in way
        assert token not in " ".join(companion.program.argv) + repr(companion.program)
        assert companion.pass_fds == (int(env["KVSTORE_DASHBOARD_FD"]),)
        port = int(address.split(":")[3].split("/")[0])
        with socket.create_connection(("127.0.0.1", port)):  # its clients wait until it serves
            pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_each_job_has_a_token_of_its_own_or_the_one_in_the_file(tmp_path: Path) -> None:
    tokens = []
    for file in (None, None, tmp_path / "token", tmp_path / "token"):
        with companions(job(0, file), tmp_path, {}) as (companion,):
            tokens.append(companion.program.env["KVSTORE_DASHBOARD_TOKEN"])
    assert len(set(tokens)) == 3
    assert tokens[2] == tokens[3] == (tmp_path / "token").read_text().strip()


def test_a_port_that_is_taken_ends_the_job_before_it_begins(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"--dashboard={port}"), companions(job(port), tmp_path, {}):
            pass


def test_a_file_that_others_may_open_ends_it_too(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("t" * 40)
    file.chmod(0o644)
    with pytest.raises(LaunchError, match="chmod 600"), companions(job(0, file), tmp_path, {}):
        pass


def traced(file: Path, port: int | None = None) -> Job:
    return Job(1, 1, ("python", "train.py"), cluster=Cluster(dashboard=port, trace=f"{file}:5-9"))


def test_a_trace_takes_the_observer_too_which_has_time_to_write_it(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    with companions(traced(file), tmp_path, {}) as (companion,):
        env = companion.program.env
        assert (env["KVSTORE_TRACE_FILE"], env["KVSTORE_TRACE"]) == (str(file), "5-9")
        assert "KVSTORE_DASHBOARD_FD" not in env
        assert (companion.program.name, companion.grace_s, companion.announcement) == ("trace", WRITTEN_S, [])
    assert json.loads(file.read_text()) == {"traceEvents": []}


def test_one_observer_has_the_page_and_the_trace(tmp_path: Path) -> None:
    with companions(traced(tmp_path / "trace.json", 0), tmp_path, {}) as (companion,):
        assert {"KVSTORE_TRACE_FILE", "KVSTORE_DASHBOARD_FD"} <= set(companion.program.env)
        assert companion.program.name == "dashboard"


def test_a_trace_that_cannot_be_written_ends_the_job_before_it_begins(tmp_path: Path) -> None:
    with (
        pytest.raises(LaunchError, match="--trace: cannot write"),
        companions(traced(tmp_path / "gone" / "trace.json"), tmp_path, {}),
    ):
        pass
