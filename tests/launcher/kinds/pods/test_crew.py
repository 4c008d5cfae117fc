from __future__ import annotations

import json
import selectors
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from agent_doubles import Heard
from pod_jobs import job

from kvstore.job.processes import Exit
from launcher.errors import LaunchError
from launcher.job.tasks import Task
from launcher.kinds import kubernetes
from launcher.kinds.pods import pod_crew as module
from launcher.kinds.pods.pod_crew import PodCrew, PodLog

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


class Cluster:
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
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster(monkeypatch)
    made.start()
    return made


def test_all_is_created_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = Cluster(monkeypatch, Kubectl("forbidden"))
    with pytest.raises(LaunchError, match="the cluster refused the job: forbidden"):
        refusing.start()
    refusing.crew.close()
    assert [words[0] for words in refusing.kubectl.ran] == ["create", "delete"]


def test_the_user_is_told_how_to_undo_it_by_hand(cluster: Cluster) -> None:
    assert cluster.sink.said == [
        "submitted as mnist-1; if launch.py is killed, remove the job with: "
        "kubectl delete jobs,services,secrets -l kvstore-job=mnist-1"
    ]


def test_output_is_followed_and_the_last_of_it_comes_before_the_exit(cluster: Cluster) -> None:
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
    assert cluster.sink.events[-3:] == [
        ("output", 1, 1, b"two"),
        ("output", 1, 1, b""),
        ("exited", 1, Exit(code=7)),
    ]


def test_what_is_not_wanted_is_left_to_the_cluster(cluster: Cluster) -> None:
    cluster.shows(pod("worker", RUNNING))
    log = cluster.kubectl.last("logs")
    cluster.crew.reading(False)
    assert not log.registered
    cluster.crew.reading(True)
    assert log.registered


@pytest.mark.parametrize(("signum", "what"), [(signal.SIGTERM, "jobs"), (signal.SIGKILL, "pods")])
def test_a_signal_has_the_cluster_end_all(cluster: Cluster, signum: int, what: str) -> None:
    cluster.crew.signal(signum)
    deletion = cluster.kubectl.last("delete", what)
    assert ("--grace-period=0" in deletion.words) == (signum == signal.SIGKILL)
    cluster.shows()
    assert [index for index, _ in cluster.sink.exits] == [0, 1]
    deletion.ends("forbidden")
    assert cluster.sink.said[-1] == "forbidden"


def test_a_cluster_that_does_not_answer_is_complained_about_once_and_asked_again(cluster: Cluster) -> None:
    for _ in range(3):
        cluster.kubectl.last("get", "pods").ends("connection refused")
    assert cluster.sink.said[1:] == ["cannot ask for the state of the job: connection refused"]
    cluster.shows(pod("worker", RUNNING))
    assert cluster.kubectl.last("logs")


def test_an_answer_that_is_no_list_of_pods_is_no_news(cluster: Cluster) -> None:
    listing = cluster.kubectl.last("get", "pods")
    listing.prints(b"<html>")
    listing.ends()
    assert cluster.sink.said[-1].startswith("cannot ask for the state of the job: ")


def test_nothing_is_left_in_the_cluster(cluster: Cluster) -> None:
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
