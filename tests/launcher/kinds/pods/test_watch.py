"""What becomes of pods: descriptions and the time go in, events come out."""

from __future__ import annotations

from typing import Any

import pytest
from pod_jobs import job

from launcher.job.tasks import Task, members
from launcher.kinds.pods.watch import BROKEN_S, PATIENCE_S, REMIND_S, FollowLog, PodWatch, TaskEnded
from launcher.supervision.ending import Say


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
        (2, 1, "lost its pod, which was deleted")
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
