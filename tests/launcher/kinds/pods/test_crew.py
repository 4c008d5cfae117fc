"""Pods: their objects, what becomes of them, what they run, and the crew of a job."""

from __future__ import annotations

import base64
import configparser
import dataclasses
import json
import os
import selectors
import signal
import stat
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from agent_doubles import Heard
from pod_jobs import FULL, HOSTILE, RAW, job, made

from kvstore.job import contract
from kvstore.job.curve_keys import ROOT, CurveKeys, Keyring, split_key
from kvstore.job.place import FILE, ObservingPlace, running_jobs
from kvstore.job.processes import Exit
from launcher.errors import LaunchError
from launcher.job.description import Cluster
from launcher.job.tasks import Task, members
from launcher.kinds import kubernetes
from launcher.kinds.pods import pod_crew as module
from launcher.kinds.pods.entry import INDEX, KEY, TIMEOUT_S, VARIABLES, compose, main, observers_variables
from launcher.kinds.pods.manifests import hidden, manifests
from launcher.kinds.pods.pod_crew import PodCrew, PodLog
from launcher.kinds.pods.watch import BROKEN_S, PATIENCE_S, REMIND_S, FollowLog, PodWatch, TaskEnded
from launcher.supervision.ending import Say

# ---- the objects of a job


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
        ({"command": ("python 'x",)}, "do not match"),
        ({"command": ("echo", RAW)}, "UTF-8"),
        ({"cluster": Cluster(image="i", time="90")}, "2:00:00"),
        ({"env_worker": {"BIG": "x" * 800_000}}, "1 MiB"),
    ],
)
def test_what_cannot_be_put_so(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        made(dataclasses.replace(job(), **options))


# ---- what becomes of pods: descriptions and the time go in, events come out


def pod_at(role: str, rank: int, status: dict[str, Any], **metadata: Any) -> dict[str, Any]:
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


RUNS = state(running={})


WATCHED = [Task(role, rank, ("x",), {}) for role, rank in members(job())]


def ends(events: list[Any]) -> list[tuple[int, int, str]]:
    return [(event.index, event.how.status, str(event.how)) for event in events if isinstance(event, TaskEnded)]


def test_a_job_that_goes_well() -> None:
    watch = PodWatch(WATCHED, 0.0)
    assert watch.look([], 1.0) == []
    assert watch.look([pod_at("worker", 1, RUNS)], 2.0) == [FollowLog(3, "n-worker-1-x")]
    done = [pod_at(task.role, task.rank, ended(0, "Completed")) for task in WATCHED]
    events = watch.look(done, 3.0)
    assert [event.index for event in events if isinstance(event, FollowLog)] == [0, 1, 2, 3]
    assert ends(events) == [(index, 0, "exited with code 0") for index in range(4)]
    assert watch.look(done, 4.0) == []


def test_the_first_to_fail_comes_first_and_not_who_was_ended_for_it() -> None:
    later = "2024-01-01T00:00:05Z"
    watch = PodWatch(WATCHED, 0.0)
    events = watch.look(
        [
            pod_at("scheduler", 0, ended(1, finished=later)),
            pod_at("worker", 0, ended(143, finished="2024-01-01T00:00:00Z"), deletionTimestamp=later),
            pod_at("worker", 1, ended(7)),
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
    (end,) = ends(PodWatch(WATCHED, 0.0).look([pod_at("worker", 0, status)], 1.0))
    assert end[0] == 2
    assert end[1] != 0
    assert end[2] == text


def test_a_pod_that_vanishes_has_failed_and_its_successor_is_nobody() -> None:
    watch = PodWatch(WATCHED, 0.0)
    watch.look([pod_at("worker", 0, RUNS)], 1.0)
    assert ends(watch.look([pod_at("worker", 0, RUNS, name="another")], 2.0)) == [
        (2, 1, "lost its pod, which was deleted")
    ]


def test_after_deletion_nobody_is_waited_for() -> None:
    watch = PodWatch(WATCHED, 0.0)
    watch.look([pod_at("worker", 0, RUNS)], 1.0)
    watch.deleting()
    assert [end[0] for end in ends(watch.look([pod_at("worker", 0, RUNS)], 2.0))] == [0, 1, 3]
    assert [end[0] for end in ends(watch.look([], 3.0))] == [2]


UNSCHEDULABLE = {
    "phase": "Pending",
    "conditions": [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes: no GPU."}
    ],
}


NO_IMAGE = state(waiting={"reason": "ImagePullBackOff", "message": "Back-off pulling image"})


def test_who_is_missing_is_said_now_and_then_and_why() -> None:
    watch = PodWatch(WATCHED, 0.0)
    pods = [pod_at("scheduler", 0, RUNS), pod_at("worker", 0, UNSCHEDULABLE), pod_at("worker", 1, NO_IMAGE)]
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
    watch = PodWatch(WATCHED[2:], 0.0)
    pods = [pod_at("worker", 0, UNSCHEDULABLE), pod_at("worker", 1, NO_IMAGE)]
    assert ends(watch.look(pods, 1.0)) == []
    assert ends(watch.look(pods, 1.0 + BROKEN_S)) == [
        (1, 1, "has not started in 2 minutes: ImagePullBackOff: Back-off pulling image")
    ]
    assert ends(watch.look(pods, PATIENCE_S)) == [
        (0, 1, "has not started in 10 minutes: Unschedulable: 0/3 nodes: no GPU.")
    ]


def test_an_image_that_comes_after_all_is_no_failure() -> None:
    watch = PodWatch(WATCHED[3:], 0.0)
    watch.look([pod_at("worker", 1, NO_IMAGE)], 1.0)
    watch.look([pod_at("worker", 1, state(waiting={"reason": "ContainerCreating"}))], BROKEN_S)
    assert ends(watch.look([pod_at("worker", 1, NO_IMAGE)], BROKEN_S + 2)) == []
    assert ends(watch.look([pod_at("worker", 1, RUNS)], 1e6)) == []


# ---- entry


BYTES = os.fsdecode(b"\xff\xfe\n")


@pytest.fixture
def mount(tmp_path: Path) -> Path:
    """As the kubelet mounts a Secret: the files are links into a directory that begins with two dots."""
    data = tmp_path / VARIABLES / "..data"
    data.mkdir(parents=True)
    (data / "TOKEN").write_bytes(os.fsencode(BYTES))
    (data / "KVSTORE_ROOT_KEY").write_text("root")
    for name in ("TOKEN", "KVSTORE_ROOT_KEY"):
        (tmp_path / VARIABLES / name).symlink_to(data / name)
    return tmp_path


def test_a_worker_is_its_command_with_its_own_number_and_variables(mount: Path) -> None:
    (mount / KEY).write_text("own")
    environ = {"DMLC_ROLE": "worker", INDEX: "3", "HOME": "/root"}
    task = compose(["python", "train.py", "a b"], environ, mount)
    assert (task.role, task.rank, task.argv) == ("worker", 3, (sys.executable, "train.py", "a b"))
    assert {name: task.env[name] for name in ("DMLC_TASK_ID", "TOKEN", "HOME")} == {
        "DMLC_TASK_ID": "3",
        "TOKEN": BYTES,
        "HOME": "/root",
    }
    assert (task.env["KVSTORE_SECRET_KEY"], task.env["KVSTORE_ROOT_KEY"]) == ("own", "root")
    assert "..data" not in task.env


def test_it_is_a_command_of_the_package() -> None:
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).resolve().parents[4] / "setup.cfg")
    scripts = setup["options.entry_points"]["console_scripts"].split("\n")
    assert f"kvstore-pod = {main.__module__}:{main.__name__}" in scripts


def test_without_a_command_it_is_a_server_or_the_scheduler(tmp_path: Path) -> None:
    task = compose([], {"DMLC_ROLE": "scheduler", INDEX: "0"}, tmp_path)
    assert (task.role, task.argv[0], *task.argv[-2:]) == ("scheduler", sys.executable, "servers", "scheduler")
    assert "KVSTORE_SECRET_KEY" not in task.env


def test_threads_of_servers_do_not_spin_and_are_as_many_as_the_manifest_says(tmp_path: Path) -> None:
    env = compose([], {"DMLC_ROLE": "server", INDEX: "0", "OMP_NUM_THREADS": "3"}, tmp_path).env
    assert (env["OMP_WAIT_POLICY"], env["OMP_NUM_THREADS"]) == ("passive", "3")


def test_members_wait_for_images_unless_somebody_says_how_long(mount: Path) -> None:
    environ = {"DMLC_ROLE": "server", INDEX: "0"}
    assert compose([], environ, mount).env["KVSTORE_JOIN_TIMEOUT_S"] == str(TIMEOUT_S)
    assert compose([], {**environ, "KVSTORE_JOIN_TIMEOUT_S": "7"}, mount).env["KVSTORE_JOIN_TIMEOUT_S"] == "7"
    (mount / VARIABLES / "KVSTORE_JOIN_TIMEOUT_S").write_text("8")
    assert compose([], {**environ, "KVSTORE_JOIN_TIMEOUT_S": "7"}, mount).env["KVSTORE_JOIN_TIMEOUT_S"] == "8"


SECRET = {"KVSTORE_JOB_SECRET": "s" * 32, "KVSTORE_JOB": "train", "DMLC_NUM_WORKER": "4", "DMLC_NUM_SERVER": "2"}
SECRET |= {"DMLC_PS_ROOT_URI": "train-scheduler-0-0.train", "DMLC_PS_ROOT_PORT": "9091"}


def test_keys_are_made_from_the_secret_that_all_pods_have(tmp_path: Path) -> None:
    tasks = [compose([], {"DMLC_ROLE": "server", INDEX: str(rank), **SECRET}, tmp_path) for rank in (0, 1)]
    keyring = Keyring.derived("s" * 32, "train", contract.members(4, 2))
    for rank, task in enumerate(tasks):
        assert keyring.variables("server", rank).items() <= task.env.items()
        assert "KVSTORE_JOB_SECRET" not in task.env


def test_a_key_of_its_own_comes_before_the_secret(tmp_path: Path) -> None:
    (tmp_path / KEY).write_text("own")
    env = compose([], {"DMLC_ROLE": "server", INDEX: "0", **SECRET}, tmp_path).env
    assert env["KVSTORE_SECRET_KEY"] == "own"
    assert "KVSTORE_MEMBER_KEYS" not in env


def test_no_keys_are_made_where_links_are_plain(tmp_path: Path) -> None:
    environ = {"DMLC_ROLE": "server", INDEX: "0", **SECRET, "KVSTORE_ENCRYPTION": "0"}
    assert "KVSTORE_SECRET_KEY" not in compose([], environ, tmp_path).env


def test_the_scheduler_listens_at_its_own_address(tmp_path: Path) -> None:
    environ = {INDEX: "0", **SECRET, "DMLC_NODE_HOST": "10.0.0.1"}
    uris = [
        compose([], {**environ, "DMLC_ROLE": role}, tmp_path).env["DMLC_PS_ROOT_URI"]
        for role in ("scheduler", "server")
    ]
    assert uris == ["10.0.0.1", "train-scheduler-0-0.train"]


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({INDEX: "0"}, "DMLC_ROLE is not set"),
        ({"DMLC_ROLE": "server"}, "JOB_COMPLETION_INDEX is not set; .* an Indexed Job the number"),
        (
            {"DMLC_ROLE": "server", INDEX: "2", **SECRET},
            r"number 2 of the servers, counted from 0, .* DMLC_NUM_SERVER is 2",
        ),
        (
            {"DMLC_ROLE": "server", INDEX: "0", **SECRET, "KVSTORE_JOB_SECRET": "short"},
            "KVSTORE_JOB_SECRET is too short",
        ),
        ({"DMLC_ROLE": "server", INDEX: "0", **SECRET, "DMLC_NUM_WORKER": "many"}, "kvstore-pod: DMLC_NUM_WORKER"),
    ],
)
def test_what_a_manifest_may_lack_is_said(environ: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=message):
        compose([], environ, tmp_path)


def test_a_command_that_is_badly_quoted_ends_it(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="quotes"):
        compose(["python 'x"], {"DMLC_ROLE": "worker", INDEX: "0"}, tmp_path)


def test_a_command_that_is_not_there_has_the_exit_code_of_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DMLC_ROLE", "worker")
    monkeypatch.setenv(INDEX, "1")
    assert main(["/no/such/program"], str(tmp_path)) == 127
    assert capsys.readouterr().err == "cannot start worker 1: there is no command /no/such/program\n"


PLAIN = {
    "DMLC_ROLE": "scheduler",
    "DMLC_PS_ROOT_URI": "10.0.0.7",
    "DMLC_PS_ROOT_PORT": "9091",
    "DMLC_NUM_WORKER": "2",
    "DMLC_NUM_SERVER": "1",
}


def test_observers_in_the_pod_find_the_job(tmp_path: Path) -> None:
    assert observers_variables(PLAIN, tmp_path) == {}
    [(directory, place)] = running_jobs([tmp_path])
    assert isinstance(place, ObservingPlace)
    assert (place.address, place.key, place.workers, place.servers) == ("tcp://10.0.0.7:9091", "", 2, 1)
    assert stat.S_IMODE((directory / FILE).stat().st_mode) == 0o600


def test_they_have_a_key_of_their_own_which_the_scheduler_knows(tmp_path: Path) -> None:
    keyring = Keyring.random(contract.members(2, 1))
    env = PLAIN | keyring.variables(*ROOT)
    told = observers_variables(env, tmp_path)
    [(_, place)] = running_jobs([tmp_path])
    assert isinstance(place, ObservingPlace)
    assert split_key(place.address)[1] == keyring.pairs[ROOT][0]
    keys = CurveKeys.from_env(env | told)
    observer = place.config({}).keys
    assert keys is not None
    assert observer is not None
    assert keys.observer == observer.public
    assert place.key not in "".join(told.values())


@pytest.mark.parametrize("env", [PLAIN | {"DMLC_PS_ROOT_PORT": "x"}, {"DMLC_ROLE": "scheduler"}], ids=["bad", "none"])
def test_settings_that_are_wrong_are_the_schedulers_to_tell(env: dict[str, str], tmp_path: Path) -> None:
    assert observers_variables(env, tmp_path) == {}
    assert list(running_jobs([tmp_path])) == []


def test_where_nothing_is_writable_there_are_no_observers(tmp_path: Path) -> None:
    assert observers_variables(PLAIN, tmp_path / "none") == {}


# ---- crew


TASKS = [Task("scheduler", 0, ("x",), {}), Task("worker", 0, ("x",), {})]
STAMP = b"2024-01-01T00:00:0%d.5Z "


class Stream:
    """A kubectl that runs until the test ends it."""

    def __init__(self, words: Sequence[str], on_data: Callable[[bytes], None], on_over: Callable[[], None]) -> None:
        self.words, self._on_data, self._on_over = words, on_data, on_over
        self.over, self.complaint, self.registered = False, "", False

    def register(self, selector: Any) -> None:
        self.registered = True

    def unregister(self) -> None:
        self.registered = False

    def prints(self, data: bytes) -> None:
        self._on_data(data)

    def ends(self, complaint: str = "") -> None:
        self.over, self.complaint = True, complaint
        self._on_over()

    def close(self) -> None:
        self.over = True


class Kubectl:
    """Keeps what it is asked for."""

    def __init__(self, problem: str = "") -> None:
        self.problem = problem
        self.ran: list[tuple[str, ...]] = []
        self.streams: list[Stream] = []

    def run(self, *words: str, stdin: str = "") -> str:
        self.ran.append(words)
        return self.problem

    def listen(self, words: Sequence[str], on_data: Any, on_over: Any) -> Stream:
        self.streams.append(Stream(words, on_data, on_over))
        return self.streams[-1]

    def last(self, *words: str) -> Stream:
        return [stream for stream in self.streams if tuple(stream.words[: len(words)]) == words][-1]


def pod(role: str, state: dict[str, Any]) -> dict[str, Any]:
    return {
        "metadata": {
            "name": f"n-{role}-0",
            "labels": {"kvstore-role": role},
            "annotations": {"batch.kubernetes.io/job-completion-index": "0"},
        },
        "status": {"containerStatuses": [{"state": state}]},
    }


RUNNING = {"running": {}}
FAILED = {"terminated": {"exitCode": 7, "reason": "Error", "finishedAt": "2024-01-01T00:00:09Z"}}


class Believed:
    """A crew, and the cluster that it believes to talk to. Every look at the crew asks for the pods anew."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kubectl: Kubectl | None = None) -> None:
        monkeypatch.setattr(module, "POLL_S", 0.0)
        monkeypatch.setattr(module, "PODS_PER_S", 1e9)
        self.kubectl = kubectl or Kubectl()
        self.sink = Heard()
        self.crew = PodCrew(self.kubectl, "mnist-1", TASKS, "{}")  # type: ignore[arg-type]

    def start(self) -> None:
        self.crew.start(selectors.DefaultSelector(), self.sink)
        self.crew.collect()

    def shows(self, *pods: dict[str, Any]) -> None:
        listing = self.kubectl.last("get", "pods")
        listing.prints(json.dumps({"items": pods}).encode())
        listing.ends()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Believed:
    made = Believed(monkeypatch)
    made.start()
    return made


def test_all_is_created_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = Believed(monkeypatch, Kubectl("forbidden"))
    with pytest.raises(LaunchError, match="the cluster refused the job: forbidden"):
        refusing.start()
    refusing.crew.close()
    assert [words[0] for words in refusing.kubectl.ran] == ["create", "delete"]


def test_the_user_is_told_how_to_undo_it_by_hand(cluster: Believed) -> None:
    assert cluster.sink.said == [
        "submitted as mnist-1; if launch.py is killed, remove the job with: "
        "kubectl delete jobs,services,secrets -l kvstore-job=mnist-1"
    ]


def test_output_is_followed_and_the_last_of_it_comes_before_the_exit(cluster: Believed) -> None:
    cluster.shows(pod("worker", RUNNING))
    log = cluster.kubectl.last("logs", "n-worker-0")
    assert "--follow" in log.words
    log.prints(STAMP % 1 + b"one\n")
    assert cluster.sink.events[-1] == ("output", 1, 1, b"one\n")
    log.ends()
    cluster.shows(pod("worker", FAILED))
    assert cluster.sink.exits == []
    cluster.kubectl.last("logs", "n-worker-0").ends()  # it was followed once more, and ended at once
    rest = cluster.kubectl.last("logs", "n-worker-0")
    assert "--follow" not in rest.words
    assert list(rest.words[-2:]) == ["--since-time", "2024-01-01T00:00:01.5Z"]
    rest.prints(STAMP % 1 + b"one\n" + STAMP % 2 + b"two")
    rest.ends()
    assert cluster.sink.events[-3:] == [("output", 1, 1, b"two"), ("output", 1, 1, b""), ("exited", 1, Exit(code=7))]


def test_what_is_not_wanted_is_left_to_the_cluster(cluster: Believed) -> None:
    cluster.shows(pod("worker", RUNNING))
    log = cluster.kubectl.last("logs")
    cluster.crew.reading(False)
    assert not log.registered
    cluster.crew.reading(True)
    assert log.registered


@pytest.mark.parametrize(("signum", "what"), [(signal.SIGTERM, "jobs"), (signal.SIGKILL, "pods")])
def test_a_signal_has_the_cluster_end_all(cluster: Believed, signum: int, what: str) -> None:
    cluster.crew.signal(signum)
    deletion = cluster.kubectl.last("delete", what)
    assert ("--grace-period=0" in deletion.words) == (signum == signal.SIGKILL)
    cluster.shows()
    assert [index for index, _ in cluster.sink.exits] == [0, 1]
    deletion.ends("forbidden")
    assert cluster.sink.said[-1] == "forbidden"


def test_a_cluster_that_does_not_answer_is_complained_about_once_and_asked_again(cluster: Believed) -> None:
    for _ in range(3):
        cluster.kubectl.last("get", "pods").ends("connection refused")
    assert cluster.sink.said[1:] == ["cannot ask for the state of the job: connection refused"]
    cluster.shows(pod("worker", RUNNING))
    assert cluster.kubectl.last("logs")


def test_an_answer_that_is_no_list_of_pods_is_no_news(cluster: Believed) -> None:
    listing = cluster.kubectl.last("get", "pods")
    listing.prints(b"<html>")
    listing.ends()
    assert cluster.sink.said[-1].startswith("cannot ask for the state of the job: ")


def test_nothing_is_left_in_the_cluster(cluster: Believed) -> None:
    cluster.shows(pod("worker", RUNNING))
    cluster.crew.close()
    cluster.crew.close()
    assert all(stream.over for stream in cluster.kubectl.streams)
    deleted = [words for words in cluster.kubectl.ran if words[0] == "delete"]
    assert [words[1] for words in deleted] == ["jobs,services,secrets"]


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


def test_there_must_be_a_kubectl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="needs kubectl on PATH") as caught:
        kubernetes.run(job(), lambda task, how: None)
    assert caught.value.exit_code == 127
