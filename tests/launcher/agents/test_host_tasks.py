"""What agents are to start; that they are told it, and start it, is in test_run and in test_agent."""

from __future__ import annotations

import os
import selectors
from collections.abc import Iterator, Mapping

import pytest
import screen
from agent_doubles import Wire

from kvstore.job.contract import Member
from launcher.agents import host_tasks
from launcher.agents.host_tasks import HostTasks
from launcher.agents.links import protocol as p
from launcher.agents.remote import RemoteAgent
from launcher.job.cluster import Cluster
from launcher.job.description import Job
from launcher.job.tasks import Rendezvous
from launcher.output.outlet import Outlet

JOB = Job(2, 1, ("python", "train.py"), env_server={"S": "1"}, cluster=Cluster(encryption=False))
AT = Rendezvous("10.0.0.1", 9000, "kv-job", "ssh", "10.0.0.1", fd=5)
PLACED: list[tuple[str, list[Member]]] = [("a", [("server", 0), ("worker", 1)]), ("b", [("worker", 0)])]


@pytest.fixture
def remotes() -> Iterator[list[RemoteAgent]]:
    """Agents on two hosts, which have told their addresses: 10.0.0.10 and 10.0.0.11."""
    with selectors.DefaultSelector() as selector:
        made = []
        for number, (host, members) in enumerate(PLACED):
            wire = Wire()
            remote = RemoteAgent(host, wire)
            remote.members = list(members)
            remote.open(selector)
            wire.hears(p.Surveyed(f"10.0.0.1{number}", "", False, 1, ""))
            made.append(remote)
        yield made
        for remote in made:
            remote.close()


def tasks(remotes: list[RemoteAgent], environ: Mapping[str, str] | None = None) -> HostTasks:
    return HostTasks(JOB, remotes, AT, {"HOME": "/me"} if environ is None else environ)


def test_the_scheduler_runs_here_and_all_others_where_their_agents_are(remotes: list[RemoteAgent]) -> None:
    placed = tasks(remotes)
    assert [(task.name, task.host) for task in placed.tasks] == [
        *(("scheduler", ""), ("server 0", "a")),
        *(("worker 0", "b"), ("worker 1", "a")),
    ]
    assert placed.where == "on 2 hosts"
    assert [remote.indices for remote in remotes] == [[1, 3], [2]]
    scheduler, *others = placed.tasks
    assert scheduler.argv
    assert scheduler.env["HOME"] == "/me"
    assert all(not task.argv and "HOME" not in task.env for task in others), "agents have words and homes of their own"
    assert [task.env["DMLC_NODE_HOST"] for task in others] == ["10.0.0.10", "10.0.0.11", "10.0.0.10"]
    assert [task.env.get("S") for task in others] == ["1", None, None]
    assert {task.env["KVSTORE_ENCRYPTION"] for task in placed.tasks} == {"0"}


def test_an_agent_is_told_its_own_tasks_and_their_places_on_its_host(remotes: list[RemoteAgent]) -> None:
    start = tasks(remotes).start(remotes[0], "/here", 12.5)
    assert (start.mark, start.directory, start.command, start.limit_s) == (
        *("kv-job", b"/here"),
        *([b"python", b"train.py"], 12.5),
    )
    assert [(index, role, rank, size) for index, role, rank, size, _ in start.tasks] == [
        (1, "server", 0, 1),
        (3, "worker", 1, 1),
    ]
    assert p.unpack(start.tasks[1][4])["KVSTORE_LOCAL_RANK"] == "0"


def test_workers_on_other_hosts_know_how_wide_the_terminal_is_that_shows_their_bars(
    remotes: list[RemoteAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    with screen.terminal() as (_, theirs):
        monkeypatch.setattr(host_tasks, "Outlet", lambda: Outlet(1, theirs))
        server, *workers = tasks(remotes, environ).tasks[1:]
    told = {"KVSTORE_COLUMNS": str(screen.COLUMNS), "NO_COLOR": "1"}
    assert all(told.items() <= worker.env.items() for worker in workers)
    assert "KVSTORE_COLUMNS" not in server.env
