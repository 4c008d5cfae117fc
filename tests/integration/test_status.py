"""``kvstore-status`` beside a real job that hangs, whose scheduler is stopped, and that goes on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import Job, job

HANGS = """
    import pathlib, time
    import numpy as np
    import kvstore as kv

    store = kv.create("dist_sync")
    store.init("w", np.zeros(8))
    store.pushpull("w", np.ones(8))
    go = pathlib.Path(__file__).with_name("go")
    if store.rank == 1:
        go.with_name("come").touch()
    while store.rank == 1 and not go.exists():
        time.sleep(0.05)  # hangs
    store.pushpull("w", np.ones(8))
    store.barrier()
"""


def status(running: Job, *options: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "kvstore.observing.status_command", str(running.process.pid), *options]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_a_job_that_hangs_says_who_is_awaited_and_where_that_one_is(tmp_path: Path) -> None:
    with job(tmp_path, HANGS, servers=1) as running:
        shown = ""

        def awaited() -> bool:
            nonlocal shown
            shown = status(running).stdout
            return "server 0: worker 0 has waited" in shown and "worker 1 is at" in shown

        running.until((tmp_path / "come").exists, "the hang")
        running.until(awaited, "the wait")
        assert "for worker 1, whose push 2 of 'w' is missing" in shown
        (line,) = (
            place for place, text in enumerate((tmp_path / "script.py").read_text().split("\n"), 1) if "# hangs" in text
        )
        assert f"script.py:{line} in <module>" in shown
        document = json.loads(status(running, "--json", "--stacks").stdout)
        assert [(wait["waiting"], wait["missing"]) for wait in document["status"]["waits"]] == [([0], [1])]
        assert {one["role"] for one in document["stacks"]} == {"worker", "server"}
        for member in document["status"]["members"]:
            assert member["pid"] in running.members(member["role"])
            assert member["host"] == socket.gethostname()
            called = Path(f"/proc/{member['pid']}/comm").read_text(encoding="ascii").strip()
            assert called == f"{member['role']}-{member['rank']}"
            assert f"  {member['pid']}\n" in shown

        (scheduler,) = running.members("scheduler")
        os.kill(scheduler, signal.SIGSTOP)
        late = status(running, "--timeout", "0.5")
        os.kill(scheduler, signal.SIGCONT)
        assert (late.returncode, "not answered within 0.5 s: it is stopped" in late.stdout) == (3, True)

        (tmp_path / "go").touch()
        assert running.wait() == 0, running.output
        assert status(running).returncode == 1, "its directory is gone"
