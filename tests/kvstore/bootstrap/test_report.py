"""Telling a job's scheduler that a member has ended."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from waiting import LONG

from kvstore import wire
from kvstore.bootstrap.report import tell
from kvstore.job.config import Config
from kvstore.transport import Transport
from kvstore.transport.choose import links


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    tmp_path.chmod(0o700)
    return {"DMLC_PS_ROOT_URI": f"ipc://{tmp_path}/scheduler"}


def hear(scheduler: Transport, *lost: wire.Lost) -> threading.Thread:
    """Let a scheduler hear this, and answer the questions that come behind."""

    def answer() -> None:
        for expected in lost:
            heard.append(wire.decode((scheduler.recv(LONG) or (b"", []))[1]))
            assert heard[-1] == expected
            peer, frames = scheduler.recv(LONG) or (b"", [])
            scheduler.send(peer, wire.encode(wire.Explanation(wire.decode(frames).seq, "")))

    heard: list[Any] = []
    thread = threading.Thread(target=answer)
    thread.start()
    return thread


@pytest.mark.parametrize("transport", ["sockets", "zeromq"])
def test_the_scheduler_hears_who_has_ended_and_how(env: dict[str, str], transport: str) -> None:
    env["KVSTORE_TRANSPORT"] = transport
    long = "x" * (wire.MAX_REASON + 1)
    scheduler = links(Config.from_env(env))()
    try:
        scheduler.bind(env["DMLC_PS_ROOT_URI"])
        cut = wire.Lost("server", 1, long[: wire.MAX_REASON], 2, final=True)
        thread = hear(scheduler, wire.Lost("worker", 3, "exited with code 7"), cut)
        assert tell(env, "worker", 3, "exited with code 7")
        assert tell(env, "server", 1, long, 2, final=True)
        thread.join(LONG)
    finally:
        scheduler.close()


def test_a_scheduler_that_is_being_started_again_has_not_heard(env: dict[str, str]) -> None:
    assert not tell(env, "worker", 3, "exited with code 7")


def test_of_the_schedulers_own_end_nobody_is_told() -> None:
    assert not tell({"DMLC_PS_ROOT_URI": "ipc:///nowhere/scheduler"}, "scheduler", 0, "exited with code 7")
