"""Telling a job's scheduler that a member has ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from waiting import LONG

from kvstore.bootstrap.report import tell
from kvstore.job.config import Config
from kvstore.transport.choose import links
from kvstore.wire import MAX_REASON, Lost, decode


@pytest.mark.parametrize("transport", ["sockets", "zeromq"])
def test_the_scheduler_hears_who_has_ended_and_how(tmp_path: Path, transport: str) -> None:
    tmp_path.chmod(0o700)
    env = {"DMLC_PS_ROOT_URI": f"ipc://{tmp_path}/scheduler", "KVSTORE_TRANSPORT": transport}
    scheduler = links(Config.from_env(env))()
    try:
        scheduler.bind(env["DMLC_PS_ROOT_URI"])
        for how in ("exited with code 7", "x" * (MAX_REASON + 1)):
            tell(env, "worker", 3, how)
            received = scheduler.recv(LONG)
            assert received is not None
            assert decode(received[1]) == Lost("worker", 3, how[:MAX_REASON])
        tell(env, "server", 1, "was killed by SIGKILL", 2, True)
        received = scheduler.recv(LONG)
        assert received is not None
        assert decode(received[1]) == Lost("server", 1, "was killed by SIGKILL", 2, True)
    finally:
        scheduler.close()


def test_of_the_schedulers_own_end_nobody_is_told() -> None:
    tell({"DMLC_PS_ROOT_URI": "ipc:///nowhere/scheduler"}, "scheduler", 0, "exited with code 7")
