"""Jobs on Kubernetes: the manifests, what becomes of pods, and whole jobs on a stand-in for a cluster."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import goldens
import pytest
import yaml
from launched import WAITS, Launched, launch
from waiting import LONG

from kvstore.job.keyring import Keyring
from launcher.errors import LaunchError
from launcher.job.cluster import Cluster
from launcher.job.description import Job
from launcher.job.tasks import Task, members
from launcher.kinds import kubernetes
from launcher.kinds.pods.log import PodLog
from launcher.kinds.pods.manifests import hidden, manifests
from launcher.kinds.pods.watch import BROKEN_S, PATIENCE_S, REMIND_S, FollowLog, PodWatch, TaskEnded
from launcher.kinds.pods.yaml import dump
from launcher.supervision.ending import Say

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
HOSTILE = 'a\'b "c" $(id) $(DMLC_ROLE) $$(DMLC_ROLE) `x` $HOME ${HOME} %s \\n\n:=ünï \U0001f600 - [x]: {y} #z\n'
RAW = os.fsdecode(b"\xff\xfe")


def job(**options: Any) -> Job:
    cluster = Cluster(image="registry.example/train:1", **options.pop("cluster", {}))
    return Job(**{"num_workers": 2, "num_servers": 1, "command": ("python train.py",), "cluster": cluster, **options})


FULL = {
    "namespace": "ml",
    "job_name": "mnist",
    "worker_cores": 4,
    "server_cores": 2,
    "worker_memory": "500m",
    "server_memory": "4g",
    "gpus_per_worker": 1,
    "time": "2:00:00",
}


def made(one: Job, environ: dict[str, str] | None = None) -> list[dict[str, Any]]:
    keyring = Keyring.random(members(one)) if one.cluster.encryption else None
    return manifests(one, "mnist-0a1b2c", keyring, environ or {})


# Manifests.


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


@pytest.mark.parametrize("options", [{}, {"cluster": FULL, "env_worker": {"W": HOSTILE}}])
def test_kubernetes_knows_every_field(options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from kubernetes import client
    for manifest in (shape(each) for each in made(job(**options)) for shape in (dict, hidden)):
        api = client.ApiClient()
        text = json.dumps(manifest)
        known = api.deserialize(text, f"V1{manifest['kind']}", "application/json")
        assert api.sanitize_for_serialization(known) == manifest


def test_the_yaml_is_what_it_was_made_from() -> None:
    everything = [*made(job(cluster=FULL, env_worker={"W": HOSTILE}, command=(HOSTILE, "yes", "1", "null", "~", "")))]
    assert list(yaml.safe_load_all("---\n".join(map(dump, everything)))) == everything
    odd = {"empty": [], "none": {}, "text": "", "nested": [[1, 2], [{"a": [True]}]], "on": "off", "1": "1.5"}
    assert yaml.safe_load(dump(odd)) == odd


def test_a_pod_mounts_its_own_key_alone() -> None:
    one = job()
    keyring = Keyring.random(members(one))
    objects = manifests(one, "n", keyring, {})
    secrets = {each["metadata"]["name"]: each for each in objects if each["kind"] == "Secret"}
    assert {name: base64.b64decode(value).decode() for name, value in secrets["n-keys"]["data"].items()} == {
        f"{role}-{rank}": keyring.variables(role, rank)["KVSTORE_SECRET_KEY"] for role, rank in members(one)
    }
    shown = json.dumps([each for each in objects if each["kind"] != "Secret"])
    assert not any(pair[1] in shown for pair in keyring.pairs.values())
    for role in ("scheduler", "server", "worker"):
        assert set(secrets[f"n-{role}"]["data"]) == {"KVSTORE_ROOT_KEY", "KVSTORE_MEMBER_KEYS"}
    *_, pod = (each["spec"]["template"]["spec"] for each in objects if each["kind"] == "Job")
    (mount,) = (each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "keys")
    assert mount["subPathExpr"] == "worker-$(JOB_COMPLETION_INDEX)"


def test_nobody_sets_what_is_computed_even_by_the_callers_environment() -> None:
    one = job(env_names=("DMLC_ROLE", "TOKEN"), cluster={"encryption": False})
    secrets = [each for each in made(one, {"DMLC_ROLE": "worker", "TOKEN": "t"}) if each["kind"] == "Secret"]
    assert [set(each["data"]) for each in secrets] == [{"TOKEN"}] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cluster": Cluster()}, "--image"),
        ({"command": ("python 'x",)}, "well quoted"),
        ({"command": ("echo", RAW)}, "UTF-8"),
        ({"cluster": Cluster(image="i", time="90")}, "2:00:00"),
        ({"env_worker": {"BIG": "x" * 800_000}}, "1 MiB"),
    ],
)
def test_what_cannot_be_put_so(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        made(dataclasses.replace(job(), **options))


# What becomes of pods.


def pod(role: str, rank: int, status: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": f"n-{role}-{rank}-x",
            "labels": {"kvstore-role": role},
            "annotations": {"batch.kubernetes.io/job-completion-index": str(rank)},
            **metadata,
        },
        "status": status,
    }


def state(**state: Any) -> dict[str, Any]:
    return {"phase": "Any", "containerStatuses": [{"name": "c", "state": state}]}


def ended(code: int, reason: str = "Error", finished: str = "2024-01-01T00:00:00Z", **more: Any) -> dict[str, Any]:
    return {**state(terminated={"exitCode": code, "reason": reason, "finishedAt": finished}), **more}


RUNNING = state(running={})
TASKS = [Task(role, rank, ("x",), {}) for role, rank in members(job())]


def ends(events: list[Any]) -> list[tuple[int, int, str]]:
    return [(event.index, event.how.status, str(event.how)) for event in events if isinstance(event, TaskEnded)]


def test_a_job_that_goes_well() -> None:
    watch = PodWatch(TASKS, 0.0)
    assert watch.look([], 1.0) == []
    assert watch.look([pod("worker", 1, RUNNING)], 2.0) == [FollowLog(3, "n-worker-1-x")]
    done = [pod(task.role, task.rank, ended(0, "Completed")) for task in TASKS]
    events = watch.look(done, 3.0)
    assert [event.index for event in events if isinstance(event, FollowLog)] == [0, 1, 2, 3]
    assert ends(events) == [(index, 0, "exited with code 0") for index in range(4)]
    assert watch.look(done, 4.0) == []


def test_the_first_to_fail_comes_first_and_not_who_was_ended_for_it() -> None:
    later = "2024-01-01T00:00:05Z"
    watch = PodWatch(TASKS, 0.0)
    events = watch.look(
        [
            pod("scheduler", 0, ended(1, finished=later)),
            pod("worker", 0, ended(143, finished="2024-01-01T00:00:00Z"), deletionTimestamp=later),
            pod("worker", 1, ended(7)),
        ],
        1.0,
    )
    assert ends(events) == [
        (3, 7, "exited with code 7"),
        (0, 1, "exited with code 1"),
        (2, 143, "exited with code 143 (128 + SIGTERM)"),
    ]


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (ended(137, "OOMKilled"), "was killed: it needed more memory than it may have (OOMKilled)"),
        (
            ended(137, conditions=[{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]),
            "was ended by the cluster: EvictionByEvictionAPI",
        ),
        (
            {"phase": "Failed", "reason": "Evicted", "message": "The node was low\n on memory."},
            "was ended by the cluster: Evicted: The node was low on memory.",
        ),
        (
            state(terminated={"exitCode": 128, "reason": "StartError", "message": "no python3"}),
            "could not be started: StartError: no python3",
        ),
        (ended(3), "exited with code 3"),
    ],
)
def test_how_pods_end(status: dict[str, Any], text: str) -> None:
    (end,) = ends(PodWatch(TASKS, 0.0).look([pod("worker", 0, status)], 1.0))
    assert end[0] == 2
    assert end[1] != 0
    assert end[2] == text


def test_a_pod_that_vanishes_has_failed_and_its_successor_is_nobody() -> None:
    watch = PodWatch(TASKS, 0.0)
    watch.look([pod("worker", 0, RUNNING)], 1.0)
    assert ends(watch.look([pod("worker", 0, RUNNING, name="another")], 2.0)) == [
        (2, 1, "lost its pod: somebody has deleted it")
    ]


def test_after_deletion_nobody_is_waited_for() -> None:
    watch = PodWatch(TASKS, 0.0)
    watch.look([pod("worker", 0, RUNNING)], 1.0)
    watch.deleting()
    assert [end[0] for end in ends(watch.look([pod("worker", 0, RUNNING)], 2.0))] == [0, 1, 3]
    assert [end[0] for end in ends(watch.look([], 3.0))] == [2]


UNSCHEDULABLE = {
    "phase": "Pending",
    "conditions": [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes: no GPU."}
    ],
}
NO_IMAGE = state(waiting={"reason": "ImagePullBackOff", "message": "Back-off pulling image"})


def test_who_is_missing_is_said_now_and_then_and_why() -> None:
    watch = PodWatch(TASKS, 0.0)
    pods = [pod("scheduler", 0, RUNNING), pod("worker", 0, UNSCHEDULABLE), pod("worker", 1, NO_IMAGE)]
    assert not [event for event in watch.look(pods, REMIND_S - 1) if isinstance(event, Say)]
    said = [event for event in watch.look(pods, REMIND_S) if isinstance(event, Say)]
    assert said == [
        Say(
            "waiting for server 0 (it has no pod yet), worker 0 (Unschedulable: 0/3 nodes: no GPU.), "
            "worker 1 (ImagePullBackOff: Back-off pulling image)"
        )
    ]
    assert not [event for event in watch.look(pods, REMIND_S + 1) if isinstance(event, Say)]
    assert [event for event in watch.look(pods, 2 * REMIND_S) if isinstance(event, Say)] == said


def test_only_some_of_many_are_named() -> None:
    many = [Task("worker", rank, ("x",), {}) for rank in range(9)]
    (said,) = PodWatch(many, 0.0).look([], REMIND_S)
    assert isinstance(said, Say)
    assert said.text.endswith("worker 2 (it has no pod yet) and 6 more")


def test_who_never_starts_has_failed() -> None:
    watch = PodWatch(TASKS[2:], 0.0)
    pods = [pod("worker", 0, UNSCHEDULABLE), pod("worker", 1, NO_IMAGE)]
    assert ends(watch.look(pods, 1.0)) == []
    assert ends(watch.look(pods, 1.0 + BROKEN_S)) == [
        (1, 1, "has not started in 2 minutes: ImagePullBackOff: Back-off pulling image")
    ]
    assert ends(watch.look(pods, PATIENCE_S)) == [
        (0, 1, "has not started in 10 minutes: Unschedulable: 0/3 nodes: no GPU.")
    ]


def test_an_image_that_comes_after_all_is_no_failure() -> None:
    watch = PodWatch(TASKS[3:], 0.0)
    watch.look([pod("worker", 1, NO_IMAGE)], 1.0)
    watch.look([pod("worker", 1, state(waiting={"reason": "ContainerCreating"}))], BROKEN_S)
    assert ends(watch.look([pod("worker", 1, NO_IMAGE)], BROKEN_S + 2)) == []
    assert ends(watch.look([pod("worker", 1, RUNNING)], 1e6)) == []


@pytest.mark.parametrize("fraction", [".5", ".500000000", ""])
def test_a_log_that_was_cut_goes_on_where_it_was(fraction: str) -> None:
    zone = "+08:00" if fraction else "Z"
    log = PodLog()
    one, two = f"2024-01-01T00:00:01{fraction}{zone}".encode(), f"2024-01-01T00:00:02.25{zone}".encode()
    assert log.since == ""
    assert log.feed(one + b" a\n" + two + b" half") == b"a\n"
    assert log.since == one.decode()
    log.resume()
    assert log.feed(one + b" a\n" + two + b" half a line\n") == b"half a line\n"
    assert log.feed(two + b" \nno stamp\n" + two + b" end") == b"\nno stamp\n"
    assert log.finish() == b"end"


# Whole jobs.

DRIVER = """
import json, sys
from launcher.job.cluster import Cluster
from launcher.supervision.ending import EndingLimits
from launcher.errors import LaunchError
from launcher.job.description import Job
from launcher.kinds import kubernetes

options = json.loads(sys.argv[1])
options["command"] = tuple(options["command"])
options["env_names"] = tuple(options.get("env_names", ()))
options["server_argv"] = tuple(options.get("server_argv", ()))
cluster = Cluster(image="i", **options.pop("cluster", {}))
limits = EndingLimits(window=2.0, linger=10.0, patience=5.0, blame=5.0, grace=3.0, short_grace=3.0, kill=2.0)
try:
    sys.exit(kubernetes.run(Job(**options, cluster=cluster), print, limits=limits))
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


@pytest.mark.parametrize("encryption", [True, False])
def test_a_whole_job(cluster: FakeCluster, encryption: bool) -> None:
    (cluster.home / "cut").touch()
    cluster.start(
        ["python", "-c", WORKER + "# $(DMLC_ROLE) $$ $$(X) \U0001f600"],
        {"RAW": RAW},
        real=True,
        env_worker={"HOSTILE": HOSTILE},
        env_names=["RAW"],
        cluster={"encryption": encryption},
    )
    code, out, err = cluster.end()
    assert (code, out) == (
        0,
        sorted(f"[worker {rank}] {line}" for rank in (0, 1) for line in ("sum 2.0", repr(HOSTILE), repr(RAW))),
    ), err
    name = re.search(r"submitted as (kvstore-\w{6});", err)
    assert name is not None
    assert cluster.is_empty()
    said = " ".join(cluster.commands)
    assert f"delete jobs,services,secrets --selector kvstore-job={name[1]}" in said
    assert "--since-time" in said
    assert HOSTILE not in said


def test_the_first_failure_is_the_exit_code(cluster: FakeCluster) -> None:
    cluster.start(["python -c 'import os, time; time.sleep(1); os._exit(7 * int(os.environ[\"DMLC_TASK_ID\"]))'"])
    code, _, err = cluster.end()
    assert code == 7
    assert "launch.py: worker 1 exited with code 7" in err
    assert cluster.is_empty()


def test_a_command_that_is_not_there(cluster: FakeCluster) -> None:
    cluster.start(["no-such-program"])
    code, out, err = cluster.end()
    assert code == 127
    assert "[worker 0] cannot start worker 0: no such command: no-such-program" in out
    assert "exited with code 127" in err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
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
    assert err == "refused: the cluster does not take the job: quota exceeded\n"
    assert cluster.commands[-1].startswith("delete")


def test_there_must_be_a_kubectl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="no kubectl on PATH") as caught:
        kubernetes.run(job(), lambda task, how: None)
    assert caught.value.exit_code == 127


# Kubeflow's operator, or whoever else sets MXNet's variables.


def _free_port() -> int:
    """A port that is free, and not one that a connection of somebody else's may be given meanwhile."""
    for port in range(20000 + os.getpid() % 5000, 32000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


def test_the_variables_of_an_mxjob_are_enough(tmp_path: Path) -> None:
    port = str(_free_port())
    roles = [("scheduler", 1), ("server", 1), ("worker", 2)]
    config = {
        "cluster": {role: [{"url": "127.0.0.1", "port": int(port)}] * count for role, count in roles},
        "labels": {role: "" for role, _ in roles},
    }
    running = []
    for role, count in roles:
        for index in range(count):
            environ = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
            environ |= {
                "PYTHONPATH": str(ROOT),
                "MX_CONFIG": json.dumps({**config, "task": {"type": role, "index": index}}),
                "DMLC_PS_ROOT_PORT": port,
                "DMLC_PS_ROOT_URI": "127.0.0.1",
                "DMLC_NUM_SERVER": "1",
                "DMLC_NUM_WORKER": "2",
                "DMLC_ROLE": role,
                "DMLC_USE_KUBERNETES": "1",
                "KVSTORE_TIMEOUT_S": str(LONG),  # who waits for longer says for whom, and that is in `outputs`
                "HOSTILE": "",
                "RAW": "",
            }
            words = ["-c", WORKER] if role == "worker" else ["-m", "servers"]
            directory, token = tmp_path / f"{role}-{index}", uuid.uuid4().hex
            process = launch([sys.executable, *words], environ, token, tmp_path, directory)
            running.append(Launched(process, directory, token))
    deadline = time.monotonic() + 2 * LONG
    try:
        for one in running:
            with suppress(subprocess.TimeoutExpired):
                one.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for one in running:
            one.end()
    outputs = [one.err + one.out for one in running]
    assert [one.process.returncode for one in running] == [0] * 4, outputs
    assert [output.splitlines()[0] for output in outputs[2:]] == ["sum 2.0"] * 2
