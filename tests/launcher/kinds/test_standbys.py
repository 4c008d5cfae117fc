"""Jobs with standbys, with real servers: processes and hosts are lost, and every push counts once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launched import ROOT
from sites import Site
from waiting import LONG, until

pytestmark = [pytest.mark.timeout(300), pytest.mark.release]

# Each worker's share of a round is its rank + 1. When there is a file `stop`, worker 0 ends the training.
WORKER = """
import time
from pathlib import Path
import numpy as np
import kvstore as kv

store = kv.create("dist_sync")
store.set_optimizer("sgd", learning_rate=1.0)
store.init(["w", "end"], [np.zeros(3000, np.float32), np.zeros(1, np.float32)])
weight, end = np.zeros(3000, np.float32), np.zeros(1, np.float32)
rounds = 0
while not end[0]:
    last = store.rank == 0 and Path("stop").exists()
    gradients = [np.full_like(weight, store.rank + 1.0), np.full_like(end, float(last))]
    store.pushpull(["w", "end"], gradients, [weight, end])
    rounds += 1
    assert (weight == -3.0 * rounds).all(), (rounds, weight)
    time.sleep(0.01)
print("exact, with", store.statistics().takeovers, "takeovers", flush=True)
"""


def test_a_job_goes_on_when_a_server_a_standby_and_the_scheduler_are_killed(tmp_path: Path, short: Path) -> None:
    faults = ("kill:server:0@round:40", "kill:scheduler@15s")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "KVSTORE_"))}
    environ |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(short)}
    options = ["-n", "2", "-s", "1", "--replicas", "1", "--log-dir", "logs", *(f"--inject={fault}" for fault in faults)]
    err = (tmp_path / "err").open("w+")
    with (
        err,
        subprocess.Popen(
            [sys.executable, "-m", "launcher", *options, "python", "-c", WORKER],
            cwd=tmp_path,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
        ) as job,
    ):

        def said() -> str:
            return (tmp_path / "err").read_text()

        until(
            lambda: "successor took over" in said() and "is in step again" in said(),
            timeout=3 * LONG,
            over=lambda: None if job.poll() is None else said(),
        )
        (tmp_path / "stop").touch()
        out, _ = job.communicate(timeout=LONG)
        assert job.returncode == 0, said()
    assert sorted(out.splitlines()) == [f"[worker {rank}] exact, with 1 takeovers" for rank in (0, 1)]
    for name in ("server 0", "scheduler"):
        log = (tmp_path / "logs" / f"{name.replace(' ', '-')}.log").read_text()
        starts = [line.partition("launch.py: ")[2] for line in log.splitlines() if "launch.py: " in line]
        assert starts[:3] == [
            *(f"start 1 of {name}", "was killed by SIGKILL"),
            f"start 2 of {name}, because it was killed by SIGKILL",
        ]
    assert "server 0 was killed by SIGKILL; its standby took over at round 40" in said()
    assert "launch.py: --inject: SIGKILL for scheduler, 15 s after the start" in said()


@pytest.mark.cluster
def test_a_server_is_started_again_on_its_host_and_a_host_of_servers_may_be_lost(over_ssh: Site) -> None:
    hosts, directory = over_ssh.hosts, over_ssh.directory
    (directory / "hosts").write_text("".join(f"{hosts.addresses[i]}\n" for i in (0, 1)))
    (directory / "servers").write_text("".join(f"{hosts.addresses[i]}\n" for i in (2, 3)))
    (directory / "train.py").write_text(WORKER)
    run = over_ssh.launch(
        *("-H", str(directory / "hosts"), "--server-hosts", str(directory / "servers")),
        *("-n", "2", "-s", "1", "--replicas", "1", "--inject", "kill:server:0@round:20"),
        *("--env=KVSTORE_HEARTBEAT_TIMEOUT_S", "python", str(directory / "train.py")),
        real=True,
        env={"KVSTORE_HEARTBEAT_TIMEOUT_S": "4"},
    )
    until(lambda: "is in step again" in run.err, "a new standby", over=run.over)
    hosts.cut(3)  # with what serves now
    until(lambda: run.err.count("took over at round") == 2, "the other host to take over", over=run.over)
    (directory / "stop").touch()
    assert run.wait(LONG) == 0, run.err
    assert run.out.count("exact, with 2 takeovers") == 2, run.out


@pytest.mark.cluster
def test_a_host_is_drained_while_the_job_runs(over_ssh: Site) -> None:
    hosts, directory = over_ssh.hosts, over_ssh.directory
    (directory / "hosts").write_text("".join(f"{hosts.addresses[i]}\n" for i in (0, 1)))
    (directory / "servers").write_text("".join(f"{hosts.addresses[i]}\n" for i in (2, 3)))
    (directory / "train.py").write_text(WORKER)
    run = over_ssh.launch(
        *("-H", str(directory / "hosts"), "--server-hosts", str(directory / "servers")),
        *("-n", "2", "-s", "1", "--replicas", "1"),
        *("--env=KVSTORE_HEARTBEAT_TIMEOUT_S", "python", str(directory / "train.py")),
        real=True,
        env={"KVSTORE_HEARTBEAT_TIMEOUT_S": "4"},
    )

    def order(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "launcher.job_command", *words, "--job", str(run.pid), "--timeout", "20"]
        environ = {**over_ssh.env, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)

    def where(name: str) -> int:
        return next(i for i in range(len(hosts)) if over_ssh.processes(name, i))

    moved = "move-server", "standby:0", "--to", hosts.addresses[3]
    until(lambda: order(*moved).returncode == 0, "orders to be taken", over=run.over)
    until(lambda: "is in step again" in run.err, "a new standby", over=run.over)
    assert (where("server-0"), where("standby-0")) == (2, 3)
    done = order("drain-host", hosts.addresses[2])
    assert done.returncode == 0, (done, run.err)
    until(lambda: run.err.count("is in step again") == 2, "another standby", over=run.over)
    assert (where("server-0"), where("standby-0")) == (0, 3)
    hosts.cut(3)  # with what serves now
    until(lambda: run.err.count("took over at round") == 2, "the other host to take over", over=run.over)
    assert order("drain-host", "nobody").returncode == 2, "it is none of the job's"
    (directory / "stop").touch()
    assert run.wait(LONG) == 0, run.err
    assert run.out.count("exact, with 2 takeovers") == 2, run.out
