"""Whole jobs on a stand-in for a Kubernetes cluster."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import goldens
import pytest
import yaml
from launched import ROOT, WAITS
from pod_jobs import FULL, HOSTILE, RAW, job, made
from waiting import LONG

from launcher.job.description import Job
from launcher.kinds import kubernetes
from launcher.kinds.kubernetes import dump

HERE = ROOT / "tests" / "launcher"


@pytest.mark.parametrize(
    ("name", "one"),
    [
        ("kubernetes", job(cluster=FULL, env_server={"S": "secret"}, env_worker={"W": HOSTILE})),
        ("kubernetes-plain", job(cluster={"encryption": False}, command=("sh", "-c", "echo $(hostname) $$"))),
    ],
)
def test_the_dry_run_is_as_it_was(name: str, one: Job) -> None:
    text = kubernetes.dry_run(one) + "\n"
    goldens.same(f"{name}.yaml", text)
    assert "secret\n" not in text


DRIVER = """
import json, sys
from launcher.job.description import Cluster
from launcher.supervision.ending import EndingLimits
from launcher.errors import LaunchError
from launcher.job.description import Job
from launcher.job.description import OutputOptions
from launcher.kinds import kubernetes

options = json.loads(sys.argv[1])
options["command"] = tuple(options["command"])
options["env_names"] = tuple(options.get("env_names", ()))
options["server_argv"] = tuple(options.get("server_argv", ()))
cluster = Cluster(image="i", **options.pop("cluster", {}))
output = OutputOptions(**options.pop("output", {}))
limits = EndingLimits(window=2.0, linger=10.0, patience=5.0, blame=5.0, grace=3.0, short_grace=3.0, kill=2.0)
try:
    sys.exit(kubernetes.run(Job(**options, cluster=cluster, output=output), print, limits=limits))
except LaunchError as error:
    sys.exit(f"refused: {error}")
"""


WORKER = """
import os, kvstore as kv, numpy as np
store = kv.create("dist_sync")
store.init("w", np.zeros(3, np.float32))
out = np.zeros(3, np.float32)
store.pushpull("w", np.ones(3, np.float32), out=out)
print("sum", out[0])
print(repr(os.environ["HOSTILE"]))
print(repr(os.environ["RAW"]))
"""


class FakeCluster:
    """A cluster of processes, and launch.py's part run against it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "bin").mkdir()
        kubectl = home / "bin/kubectl"
        kubectl.write_text(f'#!/bin/sh\nexec {sys.executable} {HERE / "fake_kubectl.py"} "$@"\n')
        kubectl.chmod(0o755)
        self.process: subprocess.Popen[str] | None = None

    def start(
        self, command: list[str], env: dict[str, str] | None = None, *, real: bool = False, **options: Any
    ) -> subprocess.Popen[str]:
        address = f"127.{random.randrange(1, 255)}.{random.randrange(1, 255)}.{random.randrange(1, 255)}"
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "KVSTORE_"))}
        environ |= {"PATH": f"{self.home / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), **(env or {})}
        environ |= {"FAKE_CLUSTER": str(self.home), "FAKE_ADDRESS": address, "PYTHONUNBUFFERED": "1"}
        job = {"num_workers": 2, "num_servers": 1, "command": command, **options}
        if not real:  # a stand-in, which needs no torch
            job["server_argv"] = [sys.executable, "-S", "-c", WAITS]
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, json.dumps(job)],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self.process

    def end(self) -> tuple[int, list[str], str]:
        assert self.process is not None
        out, err = self.process.communicate(timeout=LONG)
        return self.process.returncode, sorted(out.splitlines()), err

    @property
    def commands(self) -> list[str]:
        return (self.home / "commands").read_text().splitlines()

    def is_empty(self) -> bool:
        return not [*self.home.glob("object-*"), *self.home.glob("pod-*")]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FakeCluster]:
    cluster = FakeCluster(tmp_path)
    yield cluster
    if cluster.process is not None:
        cluster.process.kill()
        cluster.process.communicate()
    for file in tmp_path.glob("*/pid"):
        with suppress(ProcessLookupError):
            os.killpg(os.getpgid(int(file.read_text())), signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("encryption", [True, pytest.param(False, marks=pytest.mark.release)])
def test_a_whole_job(cluster: FakeCluster, encryption: bool) -> None:
    (cluster.home / "cut").touch()
    cluster.start(
        ["python", "-c", WORKER + "# $(DMLC_ROLE) $$ $$(X) \U0001f600"],
        {"RAW": RAW},
        real=True,
        num_workers=1,
        env_worker={"HOSTILE": HOSTILE},
        env_names=["RAW"],
        cluster={"encryption": encryption},
    )
    code, out, err = cluster.end()
    assert (code, out) == (
        0,
        sorted(f"[worker 0] {line}" for line in ("sum 1.0", repr(HOSTILE), repr(RAW))),
    ), err
    name = re.search(r"submitted as (kvstore-\w{6});", err)
    assert name is not None
    assert cluster.is_empty()
    said = " ".join(cluster.commands)
    assert f"delete jobs,services,secrets --selector kvstore-job={name[1]}" in said
    assert "--since-time" in said
    assert HOSTILE not in said


def test_the_first_failure_is_the_exit_code(cluster: FakeCluster) -> None:
    code = 'import os, time; print(1, flush=True); time.sleep(1); os._exit(7 * int(os.environ["DMLC_TASK_ID"]))'
    logs = cluster.home / "logs"
    cluster.start([f"python -c '{code}'"], output={"log_dir": str(logs), "show": []})
    exit_code, out, err = cluster.end()
    assert (exit_code, out) == (7, [])
    assert [line.partition(" ")[2] for line in (logs / "worker-1.log").read_text().splitlines()] == [
        *("stderr F launch.py: start 1 of worker 1", "stdout F 1", "stderr F launch.py: exited with code 7")
    ]
    assert "launch.py: worker 1 exited with code 7" in err
    assert cluster.is_empty()


def test_a_command_that_is_not_there(cluster: FakeCluster) -> None:
    cluster.start(["no-such-program"])
    code, out, err = cluster.end()
    assert code == 127
    assert "[worker 0] cannot start worker 0: there is no command no-such-program" in out
    assert "exited with code 127" in err


@pytest.mark.parametrize("signum", [pytest.param(signal.SIGINT, marks=pytest.mark.release), signal.SIGTERM])
def test_a_signal_takes_everything_back(cluster: FakeCluster, signum: int) -> None:
    process = cluster.start(["python -c 'import time; print(\"up\"); time.sleep(600)'"])
    assert process.stdout is not None
    assert {process.stdout.readline(), process.stdout.readline()} == {"[worker 0] up\n", "[worker 1] up\n"}
    process.send_signal(signum)
    assert cluster.end()[0] == 128 + signum
    assert cluster.is_empty()


def test_a_job_that_is_refused_leaves_nothing(cluster: FakeCluster) -> None:
    (cluster.home / "refuse").write_text("quota exceeded")
    cluster.start(["true"])
    code, _, err = cluster.end()
    assert code == 1
    assert err == "refused: the cluster refused the job: quota exceeded\n"
    assert cluster.commands[-1].startswith("delete")


def test_the_yaml_is_what_it_was_made_from() -> None:
    everything = [*made(job(cluster=FULL, env_worker={"W": HOSTILE}, command=(HOSTILE, "yes", "1", "null", "~", "")))]
    assert list(yaml.safe_load_all("---\n".join(map(dump, everything)))) == everything
    odd = {"empty": [], "none": {}, "text": "", "nested": [[1, 2], [{"a": [True]}]], "on": "off", "1": "1.5"}
    assert yaml.safe_load(dump(odd)) == odd
