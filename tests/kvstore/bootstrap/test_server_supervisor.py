"""Rank 0's supervisor: starts the scheduler and servers, reports one that fails, and ends all when rank 0 has ended."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from waiting import LONG

from kvstore.bootstrap import server_supervisor
from kvstore.bootstrap.server_supervisor import ServerSupervisor, SupervisedJob, SupervisedProcess
from kvstore.errors import JOB_FAILED_EXIT

FOREVER = "import time; time.sleep(1000)"


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """The supervisor takes SIGTERM, in its own process."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def process(role: str, rank: int, code: str) -> SupervisedProcess:
    return SupervisedProcess(role, rank, [sys.executable, "-S", "-c", code], {"WHO": f"{role}-{rank}"})


def supervise(
    processes: Sequence[SupervisedProcess],
    *,
    parent: int | None = None,
    remove: Sequence[Path] = (),
    patience_s: float = LONG,
) -> tuple[int, list[tuple[str, int, str]]]:
    """Run a supervisor to its end; return its exit code, and what it has reported."""
    reports: list[tuple[str, int, str]] = []
    parent = os.getppid() if parent is None else parent
    job = SupervisedJob(parent, list(processes), list(map(str, remove)), -1, patience_s)
    code = ServerSupervisor(job, lambda *report: reports.append(report)).run()
    return code, reports


def test_orders_survive_the_pipe_and_show_no_keys() -> None:
    job = SupervisedJob(
        7, [SupervisedProcess("server", 1, ["python"], {"KVSTORE_SECRET_KEY": "hush"})], ["/tmp/x"], 5, 3.0
    )
    assert SupervisedJob.loads(job.dumps()) == job
    assert "hush" not in repr(job)


def test_when_all_have_ended_in_order_it_ends_and_removes_what_is_the_jobs(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "socket").touch()
    (tmp_path / "meeting").touch()
    mark = tmp_path / "mark"
    server = process("server", 0, f"import os; open({str(mark)!r}, 'w').write(os.environ['WHO'])")
    remove = [tmp_path / "job", tmp_path / "meeting", tmp_path / "never was"]
    assert supervise([process("scheduler", 0, "pass"), server], remove=remove) == (0, [])
    assert list(tmp_path.iterdir()) == [mark]
    assert mark.read_text() == "server-0"


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("raise SystemExit(7)", "exited with code 7"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
    ],
)
def test_one_that_fails_is_reported_and_the_others_have_time_to_end(
    code: str, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    scheduler, failing = process("scheduler", 0, "import time; time.sleep(0.3)"), process("server", 1, code)
    assert supervise([scheduler, failing]) == (1, [("server", 1, how)])
    assert f"kvstore: server 1 {how}" in capfd.readouterr().err


def test_who_does_not_end_in_time_is_killed() -> None:
    stays = process("scheduler", 0, FOREVER)
    assert supervise([stays, process("server", 0, "raise SystemExit(7)")], patience_s=0.1)[0] == 1


def test_who_ends_because_the_job_has_failed_is_not_to_blame() -> None:
    assert supervise([process("server", 0, f"raise SystemExit({JOB_FAILED_EXIT})")]) == (0, [])


def test_when_rank_0s_process_is_gone_all_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_supervisor, "LAST_WORDS_S", 0.1)
    gone = 1 if os.getppid() != 1 else 2
    expected = (1, [("worker", 0, "ended without leaving the job")])
    assert supervise([process("scheduler", 0, FOREVER)], parent=gone) == expected
