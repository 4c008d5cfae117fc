"""Following a job that a manager has queued; the manager is a list of states."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import LaunchError
from launcher.kinds.managers import queued
from launcher.kinds.managers.queued import QueuedJob, QueueState, follow

WAITING = QueueState("PENDING (Resources)", running=False, over=False, status=0)


RUNNING = QueueState("RUNNING", running=True, over=False, status=0)


DONE = QueueState("COMPLETED", running=False, over=True, status=0)


CANCELLED = QueueState("CANCELLED", running=False, over=True, status=1)


class Manager:
    """Says one state after the other, the last for ever; a callable among them happens at its turn."""

    def __init__(self, directory: Path, states: Sequence[Any]) -> None:
        self.out, self.err, self.cancelled = directory / "out", directory / "err", directory / "cancelled"
        self.end = directory / "end"
        self.asked = 0
        self.states = list(states)
        self.interrupts: list[int] = []
        self.on_interrupt: Callable[[int], None] = lambda _: None

    def state(self) -> QueueState:
        self.asked += 1
        while callable(self.states[0]):
            self.states.pop(0)()
        found = self.states[0] if len(self.states) == 1 else self.states.pop(0)
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, QueueState)
        return CANCELLED if self.cancelled.exists() else found

    def interrupt(self, signum: int) -> None:
        self.interrupts.append(signum)
        self.on_interrupt(signum)

    def follow(self) -> int:
        cancel = ("sh", "-c", f"echo x >>{self.cancelled}")
        job = QueuedJob("Fake job 7", self.state, self.interrupt, cancel, self.out, self.err, (self.end,))
        return follow(lambda: job, ask_s=0.0)


@pytest.fixture
def manage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Manager]:
    monkeypatch.setattr(queued, "STEP_S", 0.005)
    return lambda *states: Manager(tmp_path, states)


def write(path: Path, text: str) -> Callable[[], None]:
    def append() -> None:
        with path.open("a") as file:
            file.write(text)

    return append


def send(signum: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), signum)


def test_a_job_is_followed_to_its_end(
    manage: Callable[..., Manager], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    manager = manage()
    manager.states = [
        WAITING,
        WAITING,
        write(manager.out, "one\ntw"),
        RUNNING,
        write(manager.err, "oops\n"),
        write(manager.out, "o\n"),
        RUNNING,
        write(manager.out, "x" * 100_000),
        write(manager.end, "0"),
        DONE,
    ]
    assert manager.follow() == 0
    shown = capfd.readouterr()
    assert shown.out == "one\ntwo\n" + "x" * 100_000
    assert shown.err.splitlines() == ["launch.py: Fake job 7 was submitted", "oops"]
    assert list(tmp_path.iterdir()) == []


def test_its_exit_code_is_ours(manage: Callable[..., Manager], capfd: pytest.CaptureFixture[str]) -> None:
    assert manage(RUNNING, QueueState("FAILED", running=False, over=True, status=7)).follow() == 7
    assert "launch.py: Fake job 7 ended: FAILED, exit code 7" in capfd.readouterr().err


def test_a_manager_that_does_not_answer_is_asked_again(
    manage: Callable[..., Manager], capfd: pytest.CaptureFixture[str]
) -> None:
    down = [LaunchError(f"scontrol failed: {number}") for number in range(1, 13)]
    assert manage(RUNNING, *down, RUNNING, LaunchError("again"), DONE).follow() == 0
    said = [line.removeprefix("launch.py: ") for line in capfd.readouterr().err.splitlines()[1:]]
    assert said == ["scontrol failed: 1", "scontrol failed: 10", "again"]


def test_who_waits_is_told_so(
    manage: Callable[..., Manager], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queued, "NOTICE_S", 0.0)
    assert manage(WAITING, RUNNING, DONE).follow() == 0
    assert capfd.readouterr().err.count("launch.py: Fake job 7 is waiting: PENDING (Resources)") == 1


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_job_that_runs_ends_in_order(manage: Callable[..., Manager], signum: int, capfd: Any) -> None:
    manager = manage(RUNNING, send(signum), RUNNING)
    manager.on_interrupt = lambda _: manager.states.append(CANCELLED)
    assert manager.follow() == 128 + signum
    assert manager.interrupts == [signum]
    assert not manager.cancelled.exists()


def test_one_that_waits_is_cancelled_at_once(manage: Callable[..., Manager], capfd: Any) -> None:
    manager = manage(WAITING, send(signal.SIGINT), WAITING)
    assert manager.follow() == 130
    assert manager.interrupts == []
    assert manager.cancelled.read_text() == "x\n"
    assert capfd.readouterr().err.endswith("launch.py: Ctrl-C: Fake job 7 was canceled, and has ended\n")


def test_so_is_one_that_does_not_end_in_time(
    manage: Callable[..., Manager], capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queued, "GRACE_S", 0.0)
    manager = manage(RUNNING, send(signal.SIGTERM), RUNNING)
    assert manager.follow() == 143
    assert manager.interrupts == [signal.SIGTERM]
    assert manager.cancelled.exists()


def test_and_one_whose_user_is_in_a_hurry(manage: Callable[..., Manager], capfd: Any) -> None:
    manager = manage(RUNNING, send(signal.SIGINT), RUNNING, RUNNING, send(signal.SIGINT), RUNNING)
    assert manager.follow() == 130
    assert manager.interrupts == [signal.SIGINT]
    assert manager.cancelled.exists()


def test_a_manager_that_does_not_cancel_is_given_up(
    manage: Callable[..., Manager], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queued, "CANCEL_S", 0.3)
    manager = manage(WAITING, send(signal.SIGINT), WAITING)
    monkeypatch.setattr(manager, "state", lambda: manager.states[0] if manager.states else WAITING)
    monkeypatch.setattr(manager, "state", lambda: (send(signal.SIGINT)(), WAITING)[1])
    assert manager.follow() == 130
    assert "gave up waiting for Fake job 7 to end; it was canceled" in capfd.readouterr().err


def test_a_cancellation_that_hangs_or_is_not_there_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(queued, "STEP_S", 0.005)
    monkeypatch.setattr(queued, "CANCEL_S", 0.1)
    for cancel in (("sleep", "60"), ("/nowhere/scancel",)):
        states = iter([WAITING, "signal"])

        def ask(states: Any = states) -> QueueState:
            if next(states, "") == "signal":
                send(signal.SIGTERM)()
            return WAITING

        job = QueuedJob("Fake job 7", ask, pytest.fail, cancel, tmp_path / "out", tmp_path / "err")
        assert follow(lambda job=job: job, ask_s=0.0) == 143
        assert "gave up waiting" in capfd.readouterr().err


def test_nobody_reads_the_output_any_more(manage: Callable[..., Manager], monkeypatch: pytest.MonkeyPatch) -> None:
    read, write_end = os.pipe()
    os.close(read)
    manager = manage()
    manager.states = [RUNNING, write(manager.out, "one\n"), RUNNING, RUNNING]
    manager.on_interrupt = lambda _: manager.states.append(CANCELLED)
    before = os.dup(1)
    try:
        os.dup2(write_end, 1)
        assert manager.follow() == 128 + signal.SIGPIPE
    finally:
        os.dup2(before, 1)
        os.close(before)
        os.close(write_end)
    assert manager.interrupts == [signal.SIGPIPE]


def test_a_job_that_cannot_be_followed_is_cancelled(
    manage: Callable[..., Manager], capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = manage(RUNNING, ValueError("a bug"))
    with pytest.raises(ValueError, match="a bug"):
        manager.follow()
    assert manager.cancelled.exists()


def test_one_that_cannot_be_submitted_leaves_nothing() -> None:
    before = signal.getsignal(signal.SIGINT)

    def submit() -> QueuedJob:
        raise LaunchError("sbatch failed: invalid partition")

    with pytest.raises(LaunchError, match="invalid partition"):
        follow(submit)
    assert signal.getsignal(signal.SIGINT) is before
