"""The processes of a job, and the environment of each."""

from __future__ import annotations

import dataclasses
import os
import sys

import pytest

from kvstore.job import our_module
from kvstore.job.curve_keys import Keyring
from launcher.errors import LaunchError
from launcher.job.description import RESERVED, Cluster, Job
from launcher.job.tasks import (
    AGENT,
    LOCAL_RANK,
    HostEnvironment,
    Rendezvous,
    Role,
    Task,
    environment,
    forkable,
    members,
    passed,
    render,
    words,
)

AT = Rendezvous(uri="ipc:///t/scheduler", port=0, mark="kvstore-0-1-x")


HERE = HostEnvironment(environ={"HOME": "/h"}, python="/py", cores=8)


def job(**options: object) -> Job:
    return Job(**{"num_workers": 2, "num_servers": 1, "command": ("python", "train.py"), **options})  # type: ignore[arg-type]


def by_name(tasks: list[Task]) -> dict[str, Task]:
    return {task.name: task for task in tasks}


def test_servers_are_ours_whatever_the_working_directory_holds() -> None:
    assert words(job(), "server", "/py") == ("/py", our_module.__file__, "servers")


def test_scheduler_then_servers_then_workers() -> None:
    tasks = render(job(num_servers=2), AT, HERE)
    assert [task.name for task in tasks] == ["scheduler", "server 0", "server 1", "worker 0", "worker 1"]
    ours = words(job(), "server", "/py")
    assert [task.argv[:-1] for task in tasks[:3]] == [ours] * 3
    assert [task.argv[-1] for task in tasks[:3]] == ["scheduler", "server-0", "server-1"], "for people who look at ps"
    assert [task.argv for task in tasks[3:]] == [("/py", "train.py")] * 2


def test_standbys_are_servers_after_the_servers_with_numbers_of_their_own() -> None:
    tasks = render(job(num_servers=2, cluster=Cluster(replicas=1), env_server={"X": "1"}), AT, HERE)
    assert [task.name for task in tasks[1:5]] == ["server 0", "server 1", "standby 0", "standby 1"]
    assert [task.title for task in tasks[3:5]] == ["the standby of server 0", "the standby of server 1"]
    assert {task.env.get("KVSTORE_REPLICAS") for task in tasks} == {"1"}
    server, standby = by_name(tasks)["server 1"], by_name(tasks)["standby 1"]
    assert standby.argv == (*server.argv[:-1], "standby-1")
    assert standby.env == {**server.env, "DMLC_ROLE": "standby"}
    assert (standby.env["X"], standby.env["OMP_NUM_THREADS"]) == ("1", "4")


def test_a_server_is_told_of_the_faults_at_its_rounds() -> None:
    faults = ("kill:server:0@round:9", "stop:server:0@round:7", "kill:server:0@10s", "stop:standby:0@round:1")
    tasks = by_name(render(job(cluster=Cluster(replicas=1, inject=faults)), AT, HERE))
    assert {name: task.env["KVSTORE_INJECT"] for name, task in tasks.items() if "KVSTORE_INJECT" in task.env} == {
        "server 0": "kill:9,stop:7",
        "standby 0": "stop:1",
    }


def test_what_the_caller_is_in_a_job_of_its_own_is_not_passed_on() -> None:
    own = {"KVSTORE_REPLICAS": "1", "KVSTORE_START": "2", "KVSTORE_LOST": "SIGKILL 1.0", "KVSTORE_ROOT_FD": "5"}
    own |= {"KVSTORE_SCHEDULER_LOG": "/log", "KVSTORE_INJECT": "kill:1"}
    for task in render(job(), AT, dataclasses.replace(HERE, environ=own)):
        assert not own.keys() & set(task.env)


def test_the_whole_environment_of_a_worker() -> None:
    assert by_name(render(job(), AT, HERE))["worker 1"].env == {
        "HOME": "/h",
        "DMLC_ROLE": "worker",
        "DMLC_TASK_ID": "1",
        "DMLC_NUM_WORKER": "2",
        "DMLC_NUM_SERVER": "1",
        "DMLC_PS_ROOT_URI": "ipc:///t/scheduler",
        "DMLC_PS_ROOT_PORT": "0",
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_JOB_CLUSTER": "local",
        "KVSTORE_JOB": "kvstore-0-1-x",
        "KVSTORE_LOCAL_RANK": "1",
        "KVSTORE_LOCAL_SIZE": "2",
        "GOMP_SPINCOUNT": "1000",
        "GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x100000",
        "OMP_NUM_THREADS": "4",
        "OMP_WAIT_POLICY": "passive",
        "PYTHONUNBUFFERED": "1",
    }


def test_a_contract_holds_what_is_reserved_and_nothing_of_the_caller() -> None:
    at = Rendezvous(uri="127.0.0.1", port=9000, mark="m", cluster="ssh", node_host=None, fd=5, scheduler_log="/log")
    at = dataclasses.replace(
        at, keyring=Keyring(dict.fromkeys(members(job()), ("public", "secret")), *[("public", "")] * 2)
    )
    others = {AGENT, "KVSTORE_EXIT_REPORT", "KVSTORE_NUM_AGGREGATORS", "KVSTORE_AGGREGATOR", "KVSTORE_REPLICAS"}
    others |= {"KVSTORE_START", "KVSTORE_LOST", "KVSTORE_INJECT", "KVSTORE_READERS", "KVSTORE_MIN_WORKERS"}
    others |= {"KVSTORE_MAX_WORKERS"}
    assert set(at.contract(job()).variables("scheduler", 0)) == RESERVED - others
    assert set(at.contract(job()).variables("worker", 0)) == RESERVED - others - {
        "KVSTORE_ROOT_FD",
        "KVSTORE_SCHEDULER_LOG",
        "KVSTORE_READER_KEY",
        "KVSTORE_OBSERVER_KEY",
    }


def test_verbose_is_for_all_processes() -> None:
    assert {task.env.get("KVSTORE_VERBOSE") for task in render(job(verbose=True), AT, HERE)} == {"1"}
    assert not any("KVSTORE_VERBOSE" in task.env for task in render(job(), AT, HERE))


def test_only_the_scheduler_gets_the_socket_even_inside_another_job() -> None:
    at = Rendezvous(uri="127.0.0.1", port=9000, mark="m", fd=5)
    around = HostEnvironment(environ={"KVSTORE_ROOT_FD": "3", "DMLC_ROLE": "worker"}, python="/py", cores=1)
    tasks = by_name(render(job(), at, around))
    assert tasks["scheduler"].env["KVSTORE_ROOT_FD"] == "5"
    assert tasks["scheduler"].env["DMLC_ROLE"] == "scheduler"
    assert "KVSTORE_ROOT_FD" not in tasks["server 0"].env
    assert "KVSTORE_ROOT_FD" not in tasks["worker 0"].env


def test_options_reach_their_role_alone_and_values_are_taken_literally() -> None:
    hostile = 'a\'b "c" $(id) `x`\n:=ünï'
    tasks = by_name(render(job(env_server={"S": hostile}, env_worker={"W": hostile, "HOME": "/w"}), AT, HERE))
    assert tasks["server 0"].env["S"] == tasks["worker 0"].env["W"] == hostile
    assert tasks["worker 0"].env["HOME"] == "/w"
    assert "W" not in tasks["server 0"].env
    assert "S" not in tasks["worker 0"].env
    assert "S" not in tasks["scheduler"].env
    assert tasks["scheduler"].env["HOME"] == "/h"


@pytest.mark.parametrize(("workers", "servers", "threads"), [(2, 1, ("4", "8")), (3, 16, ("2", "1"))])
def test_the_cores_are_shared(workers: int, servers: int, threads: tuple[str, str]) -> None:
    tasks = by_name(render(job(num_workers=workers, num_servers=servers), AT, HERE))
    assert (tasks["worker 0"].env["OMP_NUM_THREADS"], tasks["server 0"].env["OMP_NUM_THREADS"]) == threads


def test_what_the_user_has_set_stays() -> None:
    around = HostEnvironment(environ={"OMP_NUM_THREADS": "5", "PYTHONUNBUFFERED": ""}, python="/py", cores=8)
    options = {"env_server": {"OMP_NUM_THREADS": "6"}, "env_worker": {"OMP_WAIT_POLICY": "active"}}
    tasks = by_name(render(job(**options), AT, around))
    assert tasks["worker 0"].env["OMP_NUM_THREADS"] == "5"
    assert tasks["worker 0"].env["OMP_WAIT_POLICY"] == "active"
    assert "GOMP_SPINCOUNT" not in tasks["worker 0"].env
    assert tasks["server 0"].env["OMP_WAIT_POLICY"] == "passive"
    assert tasks["server 0"].env["OMP_NUM_THREADS"] == "6"
    assert tasks["worker 0"].env["PYTHONUNBUFFERED"] == ""


@pytest.mark.parametrize(
    ("before", "path", "pythonpath"),
    [
        ({}, f"/shims:{os.defpath}", "/clone"),
        ({"PATH": "/bin", "PYTHONPATH": ""}, "/shims:/bin", "/clone"),
        ({"PATH": "/bin", "PYTHONPATH": "/mine"}, "/shims:/bin", "/mine:/clone"),
    ],
)
def test_python_and_the_packages_are_found(before: dict[str, str], path: str, pythonpath: str) -> None:
    around = HostEnvironment(environ=before, python="/py", cores=8, shims="/shims", source_root="/clone")
    tasks = by_name(render(job(), AT, around))
    assert tasks["worker 0"].env["PATH"] == path
    assert tasks["worker 0"].env["PYTHONPATH"] == tasks["server 0"].env["PYTHONPATH"] == pythonpath
    assert tasks["server 0"].env.get("PATH") == before.get("PATH")


def test_the_transport_goes_along_to_processes_elsewhere() -> None:
    environ = {"KVSTORE_TRANSPORT": "zeromq", "TOKEN": "t", "HOME": "/h"}
    assert passed(job(env_names=("TOKEN", "UNSET")), environ) == {"TOKEN": "t", "KVSTORE_TRANSPORT": "zeromq"}
    assert passed(job(), {"HOME": "/h"}) == {}


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
    with pytest.raises(LaunchError, match=f"--gpus-per-worker {gpus}: .*CUDA_VISIBLE_DEVICES={given} lists only "):
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


def forked(**options: object) -> tuple[list[str], dict[str, str]]:
    """The names of the tasks that one process makes, and its environment."""
    here = dataclasses.replace(HERE, python=sys.executable)
    tasks = render(job(**options), AT, here)
    found, env = forkable(dict(enumerate(tasks)))
    return [tasks[index].name for index in sorted(found)], env


def test_servers_of_a_host_come_from_one_process_with_what_they_have_in_common() -> None:
    names, env = forked(num_servers=2, env_server={"X": "1"})
    assert names == ["server 0", "server 1"]
    assert (env["HOME"], env["X"], env["KVSTORE_JOB"]) == ("/h", "1", "kvstore-0-1-x")
    assert not {"DMLC_TASK_ID", LOCAL_RANK} & env.keys()
    assert forked(cluster=Cluster(replicas=1))[0] == ["server 0", "standby 0"]


def test_one_server_that_is_not_started_again_has_an_interpreter_of_its_own() -> None:
    assert forked() == ([], {})


@pytest.mark.parametrize("options", [{"server_argv": ("gdb", "python")}, {"env_server": {"KVSTORE_FORK": "0"}}])
def test_servers_of_another_kind_have_interpreters_of_their_own(options: dict[str, object]) -> None:
    assert forked(num_servers=2, **options) == ([], {})


def test_a_switch_that_is_neither_on_nor_off_is_an_error() -> None:
    with pytest.raises(LaunchError, match="KVSTORE_FORK='maybe' is not valid"):
        forked(num_servers=2, env_server={"KVSTORE_FORK": "maybe"})


def test_a_server_whose_environment_is_another_has_an_interpreter_of_its_own() -> None:
    tasks = dict(enumerate(render(job(num_servers=3), AT, dataclasses.replace(HERE, python=sys.executable))))
    tasks[2] = dataclasses.replace(tasks[2], env={**tasks[2].env, "PYTHONPATH": "/other"})
    tasks[3] = dataclasses.replace(tasks[3], env={**tasks[3].env, "OMP_NUM_THREADS": "1"})  # it is set after the fork
    assert forkable(tasks)[0] == {1, 3}
