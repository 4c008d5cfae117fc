"""The GPUs of a host, divided among its workers."""

from __future__ import annotations

import pytest

from launcher.errors import LaunchError
from launcher.job.cluster import Cluster
from launcher.job.description import Job
from launcher.job.tasks import LOCAL_RANK, HostEnvironment, Rendezvous, Role, environment, render

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible(role: Role, local_rank: int, gpus: int, **environ: str) -> str | None:
    around = HostEnvironment(environ=environ, python="/py", cores=1)
    return environment(around, role, 1, {LOCAL_RANK: str(local_rank)}, gpus).get(VISIBLE)


@pytest.mark.parametrize(("rank", "gpus", "expected"), [(0, 1, "0"), (3, 1, "3"), (0, 2, "0,1"), (2, 2, "4,5")])
def test_each_worker_gets_so_many(rank: int, gpus: int, expected: str) -> None:
    assert visible("worker", rank, gpus) == expected


def test_of_those_that_are_given() -> None:
    given = {VISIBLE: "4,5,GPU-a,7"}
    assert [visible("worker", rank, 2, **given) for rank in range(2)] == ["4,5", "GPU-a,7"]
    assert visible("worker", 0, 3, **given) == "4,5,GPU-a"


@pytest.mark.parametrize(("rank", "gpus", "given"), [(1, 3, "4,5,GPU-a,7"), (2, 1, "4,5"), (0, 1, "")])
def test_where_there_are_not_enough_nobody_trains_without(rank: int, gpus: int, given: str) -> None:
    with pytest.raises(LaunchError, match=f"--gpus-per-worker {gpus} .*CUDA_VISIBLE_DEVICES={given} has "):
        visible("worker", rank, gpus, **{VISIBLE: given})


def test_by_default_everybody_sees_all() -> None:
    assert visible("worker", 1, 0) is None
    assert visible("worker", 1, 0, **{VISIBLE: "4,5"}) == "4,5"


def test_servers_have_no_part_in_it() -> None:
    assert visible("server", 1, 2) is None
    assert visible("scheduler", 0, 2, **{VISIBLE: "4,5"}) == "4,5"


def test_in_a_job_on_one_machine() -> None:
    job = Job(3, 1, ("x",), cluster=Cluster(gpus_per_worker=2))
    tasks = render(job, Rendezvous("ipc:///t", 0, "m"), HostEnvironment(environ={}, python="/py", cores=4))
    assert [task.env.get(VISIBLE) for task in tasks] == [None, None, "0,1", "2,3", "4,5"]
