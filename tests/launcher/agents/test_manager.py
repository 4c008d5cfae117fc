"""Agents that a manager starts and that come back: too many, too few, and strangers. The manager is a shell."""

from __future__ import annotations

import os
import re
import resource
import shlex
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launched import ROOT

from kvstore.job import processes
from launcher.agents import remote_run as agents
from launcher.agents.fleet import Carrier
from launcher.agents.links.link import ENLIST, AgentTicket
from launcher.agents.manager import ManagerRecruiter, deal
from launcher.errors import LaunchError
from launcher.job.command import agent_argv
from launcher.job.description import Job
from launcher.job.tasks import Task

AGENT = shlex.join(agent_argv(sys.executable, str(ROOT)))
# Noise at the door, and an agent with keys of its own.
STRANGERS = """
import socket, sys, time
from kvstore.job.curve_keys import pair
from launcher.agents.links.link import AgentTicket
from launcher.agents.links.hub import BackLink
from launcher.agents.links.protocol import Hello

endpoint, server, _, _ = sys.argv[1].split()
host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
noise = socket.create_connection((host, int(port)))
noise.sendall(b"\\xff" * 4000)
link = BackLink(AgentTicket(endpoint, server, *pair()))
link.send(Hello("1", "3", "stranger", 0, ""))
time.sleep(60)
"""


def job(workers: int = 2) -> Job:
    server = (sys.executable, "-S", "-c", "import signal; signal.pause()")
    return Job(workers, 1, ("echo", "here"), server_argv=server)


def launch(workers: int, manager: str, patience_s: float = 30.0) -> int:
    """Run a job whose manager is this shell script; $AGENT is how it starts an agent."""

    def submit(ticket: AgentTicket) -> Carrier:
        env = {**os.environ, ENLIST: ticket.text, "AGENT": AGENT, "STRANGERS": STRANGERS, "PYTHON": sys.executable}
        env["PYTHONPATH"] = str(ROOT)
        return Carrier("manager", ["/bin/sh", "-c", manager], env, linked=False)

    def tell(task: Task, how: str) -> None:
        pass

    recruiter = ManagerRecruiter(job(workers), "manager", submit, patience_s=patience_s)
    return agents.run(job(workers), tell, recruiter, "test")


def test_one_too_many_and_strangers_do_no_harm(capfd: pytest.CaptureFixture[str]) -> None:
    code = launch(
        2,
        '"$PYTHON" -c "$STRANGERS" "$KVSTORE_ENLIST" & s=$!\n'
        'for i in 0 1 2 3; do PMI_RANK=$i sh -c "$AGENT" & agents="$agents $!"; done\nwait $agents; kill $s',
    )
    printed = capfd.readouterr()
    assert code == 0, printed.err
    assert sorted(printed.out.splitlines()) == ["[worker 0] here", "[worker 1] here"]
    assert "stranger" not in printed.err


def test_strangers_may_keep_many_connections_and_programs_have_the_limit_that_we_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(processes, "given_files", None)
    monkeypatch.chdir(tmp_path)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
        manager = 'ulimit -S -n >limit; for i in 0 1; do PMI_RANK=$i sh -c "$AGENT" & done; wait'
        assert launch(1, manager) == 0
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, processes.MAX_FILES), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (tmp_path / "limit").read_text() == "300\n"


def test_too_few_within_patience(capfd: pytest.CaptureFixture[str]) -> None:
    for patience_s in (3.0, 12.0, 48.0):  # the one agent must have connected by then, also on a busy machine
        with pytest.raises(LaunchError) as caught:
            launch(2, 'PMI_RANK=0 sh -c "$AGENT" & wait', patience_s)
        if "only 0 of 3" not in str(caught.value):
            break
    said = rf"only 1 of 3 processes \(on .+\) connected within {patience_s:g} s; .* --host-ip"
    assert re.search(said, str(caught.value))


def test_the_manager_ends_too_soon() -> None:
    with pytest.raises(LaunchError, match="manager exited with code 9 after 0 of 3 processes had started") as caught:
        launch(2, "exit 9")
    assert caught.value.exit_code == 9


def test_an_agent_ends_before_all_are_there() -> None:
    # An agent must live until it has been heard, and a busy machine may take longer to start it: so the next ones live
    # longer. The first that was heard ends the job.
    agents = "for seconds in 2 4 8 16 32; do timeout \\$seconds $AGENT; done"
    with pytest.raises(LaunchError, match="ended before all others had started"):
        launch(2, f'PMI_RANK=0 sh -c "{agents}" & wait; exec sleep 60', 100.0)


def test_ssh_does_not_get_there_and_the_manager_waits_for_ever() -> None:
    said = "ssh: connect to host node7 port 22: No route to host"
    with pytest.raises(LaunchError, match=f"manager cannot reach all hosts: {said}"):
        launch(2, f"echo {said} >&2; exec sleep 60")


@pytest.mark.parametrize(
    ("hosts", "servers", "roles"),
    [("aabb", 2, "s0 w0 s1 w1"), ("aabb", 1, "s0 w0 w1 w2"), ("aaab", 3, "s0 s1 w0 s2"), ("ab", 1, "s0 w0")],
)
def test_servers_are_dealt_to_the_hosts(hosts: str, servers: int, roles: str) -> None:
    assert " ".join(f"{role[0]}{rank}" for role, rank in deal(list(hosts), servers)) == roles


@pytest.mark.parametrize(
    ("hosts", "servers", "roles"),
    [
        ("aaabbb", 2, "server0 standby1 worker0 server1 standby0 worker1"),
        ("ababab", 2, "server0 server1 standby1 standby0 worker0 worker1"),
        ("aabb", 1, "server0 worker0 standby0 worker1"),
        ("aaa", 1, "server0 standby0 worker0"),
    ],
)
def test_standbys_are_on_other_hosts_than_their_servers_if_there_are_any(hosts: str, servers: int, roles: str) -> None:
    assert " ".join(f"{role}{rank}" for role, rank in deal(list(hosts), servers, servers)) == roles


@given(st.lists(st.sampled_from("abcd"), min_size=2, max_size=40), st.data())
def test_dealing_gives_every_agent_a_role_and_spreads_the_servers(hosts: list[str], data: st.DataObject) -> None:
    servers = data.draw(st.integers(1, len(hosts) - 1))
    if 2 * servers < len(hosts):
        roles = deal(hosts, servers, servers)
        assert sorted(rank for role, rank in roles if role == "standby") == list(range(servers))
        assert [member for member in roles if member[0] == "server"] == [("server", rank) for rank in range(servers)]
    roles = deal(hosts, servers)
    assert [rank for role, rank in roles if role == "server"] == list(range(servers))
    assert [rank for role, rank in roles if role == "worker"] == list(range(len(hosts) - servers))
    there = Counter(host for host, (role, _) in zip(hosts, roles, strict=True) if role == "server")
    room = Counter(hosts)
    for host in room:
        assert there[host] == room[host] or there[host] >= max(there.values()) - 1
