"""The one session of a worker process: it joins when it is first asked for, and leaves at exit."""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import Any

import pytest
import torch
from threaded import ThreadedJob

from kvstore.client import DistStore
from kvstore.errors import JOB_FAILED_EXIT, ConfigError, DeadlineExceeded, ServerError
from kvstore.job.config import Config
from kvstore.member import shared_session
from kvstore.member.shared_session import SharedSession
from kvstore.transport import choose


class Alone(ThreadedJob):
    """A job whose only worker is ``process``, over an in-process network."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.process = SharedSession()

    def join(self, rank: int) -> None:
        config = self.config("worker")
        with pytest.MonkeyPatch.context() as patched:
            hooks: list[Any] = []
            patched.setattr(shared_session.atexit, "register", hooks.append)
            patched.setattr(choose, "links", self.ends)
            session = self.process.get(config)
            assert self.process.get(config) is session, "one for the whole process"
            assert hooks == [self.process.leave_at_exit]
        self.sessions.append(session)

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        assert self.process.session is not None
        assert self.process.session.left


@pytest.fixture(autouse=True)
def _no_exception_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_session, "AFTER_OTHERS_S", 0.0)
    monkeypatch.delattr(sys, "last_value", raising=False)


def test_at_exit_pushes_take_effect_and_the_member_leaves_in_order():
    with Alone() as cluster:
        store = DistStore(cluster.sessions[0])
        store.init("w", torch.zeros(1))
        ticket = store.push("w", torch.ones(1))
        cluster.process.leave_at_exit()
        assert ticket.done()
    assert set(cluster.exit_codes.values()) == {0}


def test_at_exit_after_an_exception_the_job_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    with Alone() as cluster:
        monkeypatch.setattr(sys, "last_value", ZeroDivisionError("division by zero"), raising=False)
        cluster.process.leave_at_exit()
    assert set(cluster.exit_codes.values()) == {JOB_FAILED_EXIT}
    assert "the job has failed: worker 0 failed: ZeroDivisionError: division by zero" in caplog.text


def test_at_exit_in_a_shell_an_old_exception_is_not_the_end(monkeypatch: pytest.MonkeyPatch):
    with Alone() as cluster:
        monkeypatch.setattr(sys, "last_value", ValueError("an hour ago"), raising=False)
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
        cluster.process.leave_at_exit()
    assert set(cluster.exit_codes.values()) == {0}


def test_at_exit_a_push_that_failed_is_said_and_fails_the_job(capsys: pytest.CaptureFixture[str]):
    with Alone() as cluster:

        def flush(_timeout: float) -> None:
            raise ServerError("it broke")

        cluster.sessions[0].flushes[:] = [flush]
        cluster.process.leave_at_exit()
    assert "at exit: ServerError: it broke" in capsys.readouterr().err
    assert set(cluster.exit_codes.values()) == {JOB_FAILED_EXIT}


def test_at_exit_a_push_that_others_hold_up_does_not_fail_the_job():
    with Alone() as cluster:

        def flush(timeout: float) -> None:
            assert timeout == shared_session.EXIT_GRACE_S
            raise DeadlineExceeded("not yet")

        cluster.sessions[0].flushes[:] = [flush]
        cluster.process.leave_at_exit()
    assert set(cluster.exit_codes.values()) == {0}


def test_a_forked_child_has_no_session(monkeypatch: pytest.MonkeyPatch):
    with Alone() as cluster:
        pid = os.getpid()
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: pid + 1)
            with pytest.raises(ConfigError, match="this process was forked from a member"):
                cluster.process.get(cluster.config("worker"))
            cluster.process.leave_at_exit()
        assert not cluster.sessions[0].left, "and does not end its parent's"
        cluster.process.leave_at_exit()


def test_outside_a_job_there_is_no_session():
    with pytest.raises(ConfigError, match="not part of a distributed job"):
        SharedSession().get(Config())


def test_a_process_that_runs_the_script_once_more_is_told_of_the_guard(monkeypatch: pytest.MonkeyPatch):
    """As ``multiprocessing`` runs it for spawn and forkserver, before the child's own function."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(ConfigError, match=r'below if __name__ == "__main__":$'):
        shared_session.shared(Config(role="worker"))
