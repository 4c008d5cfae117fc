"""Agents as a whole: how they run, and those that a manager starts."""

from __future__ import annotations

import os
import re
import resource
import selectors
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import open_files
import pytest
import screen
from agent_doubles import Wire
from hypothesis import given
from hypothesis import strategies as st
from launched import ROOT

import kvstore
from kvstore.job import processes
from kvstore.job.contract import Member
from kvstore.wire import Message
from launcher.agents import remote_run as agents
from launcher.agents import remote_run as agents_run
from launcher.agents.fleet import Carrier, Fleet, RemoteAgent
from launcher.agents.links import protocol as p
from launcher.agents.links.link import ENLIST, AgentTicket
from launcher.agents.manager import ManagerRecruiter, deal
from launcher.agents.remote_run import HostTasks
from launcher.agents.roll_call import RollCall
from launcher.errors import LaunchError
from launcher.job.command import agent_argv
from launcher.job.description import Cluster, Job
from launcher.job.tasks import Rendezvous, Task
from launcher.output.outlet import Outlet

# ---- run


JOB = Job(1, 1, ("python", "train.py"), cluster=Cluster(encryption=False))
FIT = p.Surveyed("127.0.0.1", "", False, 1, "")
Answer = Callable[[Message], Message | None]


def hello(version: str = kvstore.__version__) -> p.Hello:
    return p.Hello(version, "3.11.7", "node", 0, "")


def answers(surveyed: p.Surveyed = FIT, unreached: Sequence[Sequence[str]] = ()) -> Answer:
    def answer(message: Message) -> Message | None:
        if isinstance(message, p.Survey):
            return surveyed
        return p.Probed([list(failure) for failure in unreached]) if isinstance(message, p.Probe) else None

    return answer


class Recruits:
    """Agents that are there at once: by default two, one for the server, one for the worker."""

    def __init__(self, *agents: tuple[p.Hello, Answer], members: Sequence[tuple[str, list[Member]]] = ()) -> None:
        self._agents = agents
        self._members = members or (("node0", [("server", 0)]), ("node1", [("worker", 0)]))
        self.wires: list[Wire] = []
        self.prepared = 0
        self.closed = 0

    def recruit(self, roll_call: RollCall, selector: selectors.BaseSelector) -> list[RemoteAgent]:
        remotes = []
        for (host, members), (greeting, answer) in zip(self._members, self._agents, strict=True):
            wire = Wire()
            wire.reply = answer
            remote = RemoteAgent(host, wire)
            remote.members = list(members)
            remote.open(selector)
            wire.hears(greeting)
            remotes.append(remote)
            self.wires.append(wire)
        return remotes

    def prepare(self, roll_call: RollCall, selector: selectors.BaseSelector) -> None:
        self.prepared += 1

    def toward(self) -> str:
        return ""

    def close(self, patience: float) -> None:
        self.closed += 1


def run(recruits: Any, job: Job = JOB) -> int:
    return agents.run(job, pytest.fail, recruits, "test", environ={})


def refused(*agents: tuple[p.Hello, Answer]) -> list[str]:
    """The report on these agents, which are not fit."""
    recruits = Recruits(*agents)
    with pytest.raises(LaunchError) as caught:
        run(recruits)
    assert caught.value.exit_code == 1
    assert (recruits.prepared, recruits.closed) == (0, 1)
    assert all(wire.closed for wire in recruits.wires)
    assert not any(isinstance(message, p.StartTasks) for wire in recruits.wires for message in wire.sent)
    return [line.strip() for line in str(caught.value).splitlines()]


def test_hosts_must_have_the_same_version() -> None:
    assert refused((hello(), answers()), (hello("0.0.9"), answers())) == [
        "nothing was started; 1 of 2 hosts cannot take part:",
        f"node1: has torch-kvstore 0.0.9 (Python 3.11.7), but this machine has {kvstore.__version__}; install the same",
    ]


def test_what_is_wrong_on_a_host_is_told() -> None:
    problem = p.Surveyed("", "", False, 0, "there is no directory /d")
    assert refused((hello(), answers(problem)), (hello(), answers()))[1:] == ["node0: there is no directory /d"]


@pytest.mark.parametrize("address", ["", "node0", "127.0.0.1 -oProxyCommand=x"])
def test_what_an_agent_says_is_checked_before_others_are_told(address: str) -> None:
    (line,) = refused((hello(), answers(p.Surveyed(address, "", False, 1, ""))), (hello(), answers()))[1:]
    assert line.startswith(f"node0: reports the address {address!r}")


def test_hosts_must_reach_each_other() -> None:
    (line,) = refused((hello(), answers()), (hello(), answers(unreached=[("node0", "timed out")])))[1:]
    assert line.startswith("node1: cannot reach node0 (timed out); ")
    assert "--interface" in line
    assert "--host-ip" in line


def test_every_host_is_asked_for_the_command_and_told_where_servers_are() -> None:
    recruits = Recruits((hello(), answers()), (hello(), answers(unreached=[("node0", "x")])))
    with pytest.raises(LaunchError):
        run(recruits)
    for wire in recruits.wires:
        survey, probe = wire.sent[:2]
        assert isinstance(survey, p.Survey)
        assert isinstance(probe, p.Probe)
        assert survey.command == [b"python", b"train.py"]
        assert survey.directory == os.fsencode(os.getcwd())  # noqa: PTH109
        assert [target[0] for target in probe.targets] == ["this machine", "node0"]


def test_where_workers_have_a_path_of_their_own_nobody_looks_for_the_command() -> None:
    recruits = Recruits((hello("0"), answers()), (hello(), answers()))
    with pytest.raises(LaunchError):
        run(recruits, Job(1, 1, ("python", "x"), env_worker={"PATH": "/mine"}, cluster=Cluster(encryption=False)))
    (survey,) = (message for message in recruits.wires[1].sent if isinstance(message, p.Survey))
    assert survey.command == []


TOGETHER: list[tuple[str, list[Member]]] = [
    ("a", [("server", 0), ("worker", 1), ("worker", 3)]),
    ("b", [("server", 1), ("worker", 0)]),
    ("c", [("worker", 2)]),
]


def apart() -> list[tuple[str, list[Member]]]:
    """The same members with an agent each, as a cluster manager starts them."""
    return [(host, [member]) for host, members in TOGETHER for member in members]


def started(members: list[tuple[str, list[Member]]], **options: Any) -> list[tuple[str, list[Any]]]:
    """What each host is told to start, in this order, and refuses: the environment by role and rank."""

    def answer(message: Message) -> Message | None:
        if isinstance(message, p.Bye):
            return p.Bye()
        return p.Refused("enough", 1) if isinstance(message, p.StartTasks) else answers()(message)

    recruits = Recruits(*[(hello(), answer)] * len(members), members=members)
    job = Job(4, 2, ("true",), env_server={"S": "1"}, cluster=Cluster(encryption=False, **options))
    assert agents.run(job, lambda *_: None, recruits, "test", environ=dict(os.environ)) == 1
    told = []
    for (host, _), wire in zip(members, recruits.wires, strict=True):
        (start,) = (message for message in wire.sent if isinstance(message, p.StartTasks))
        told.append((host, [(role, rank, p.unpack(flat)) for _, role, rank, _, flat in start.tasks]))
    return told


def test_a_host_with_two_workers_starts_an_aggregator_after_servers_and_before_workers(
    capfd: pytest.CaptureFixture[str],
) -> None:
    told = started(TOGETHER)
    assert [[(role, rank) for role, rank, _ in tasks] for _, tasks in told] == [
        [("server", 0), ("aggregator", 0), ("worker", 1), ("worker", 3)],
        [("server", 1), ("worker", 0)],
        [("worker", 2)],
    ]
    env = {(role, rank): variables for _, tasks in told for role, rank, variables in tasks}
    assert {variables["KVSTORE_NUM_AGGREGATORS"] for variables in env.values()} == {"1"}
    assert [env["worker", rank]["KVSTORE_AGGREGATOR"] for rank in range(4)] == ["-1", "0", "-1", "0"]
    own = env["aggregator", 0]
    assert (own["DMLC_ROLE"], own["DMLC_TASK_ID"], own["DMLC_NODE_HOST"], own["S"]) == (
        *("aggregator", "0"),
        *("127.0.0.1", "1"),
    )
    assert (own["KVSTORE_LOCAL_RANK"], own["KVSTORE_LOCAL_SIZE"]) == ("0", "1")
    assert "launch.py: starting 4 workers, 2 servers, 1 aggregator on 3 hosts" in capfd.readouterr().err


def test_where_each_process_has_an_agent_the_first_workers_starts_the_aggregator() -> None:
    told = started(apart())
    assert [[(role, rank) for role, rank, _ in tasks] for _, tasks in told] == [
        *([("server", 0)], [("aggregator", 0), ("worker", 1)], [("worker", 3)]),
        *([("server", 1)], [("worker", 0)], [("worker", 2)]),
    ]


def test_there_need_be_no_aggregators() -> None:
    told = started(TOGETHER, host_aggregation=False)
    assert [len(tasks) for _, tasks in told] == [3, 2, 1]
    assert not any(name.endswith("AGGREGATORS") for _, tasks in told for *_, env in tasks for name in env)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_agents_are_asked_ends_it_in_order(signum: int) -> None:
    def interrupt(message: Message) -> None:
        os.kill(os.getpid(), signum)

    recruits = Recruits((hello(), interrupt), (hello(), answers()))
    assert run(recruits) == 128 + signum
    assert recruits.closed == 1
    assert all(wire.closed for wire in recruits.wires)


def test_when_nobody_can_be_recruited_all_is_closed() -> None:
    class Nobody(Recruits):
        def recruit(self, roll_call: RollCall, selector: selectors.BaseSelector) -> list[RemoteAgent]:
            raise LaunchError("mpirun exited with code 1")

    recruits = Nobody()
    with pytest.raises(LaunchError, match="mpirun exited"):
        run(recruits)
    assert recruits.closed == 1


PLACED_JOB = Job(2, 1, ("python", "train.py"), env_server={"S": "1"}, cluster=Cluster(encryption=False))
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


def placed_tasks(remotes: list[RemoteAgent], environ: Mapping[str, str] | None = None) -> HostTasks:
    return HostTasks(PLACED_JOB, remotes, AT, {"HOME": "/me"} if environ is None else environ)


def test_the_scheduler_runs_here_and_all_others_where_their_agents_are(remotes: list[RemoteAgent]) -> None:
    placed = placed_tasks(remotes)
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


def test_one_more_worker_runs_where_it_is_to_or_where_the_fewest_are(remotes: list[RemoteAgent]) -> None:
    placed = placed_tasks(remotes)
    starts = {remote: placed.start(remote, "/here", 12.5) for remote in remotes}
    fleet = Fleet(remotes, starts, 12.5, None, lambda *where: placed.add(*where, starts[where[-1]]))
    a, b = remotes
    b.members.append(("worker", 9))
    for index, rank, host in ((4, 2, ""), (5, 3, ""), (6, 4, "a")):
        task = fleet.more(index, rank, host)
        assert task is not None
        assert (task.name, task.host, task.env["KVSTORE_LOCAL_RANK"]) == (f"worker {rank}", "a", f"{rank - 1}")
        assert index in a.indices
    assert fleet.more(7, 5, "nowhere") is None
    assert Fleet(remotes, starts, 12.5).more(7, 5) is None
    told, start = placed.add(7, 5, b, starts[b])
    assert [(index, role, rank, size) for index, role, rank, size, _ in start.tasks] == [(7, "worker", 5, 3)]
    assert told.host == "b"


def test_an_agent_is_told_its_own_tasks_and_their_places_on_its_host(remotes: list[RemoteAgent]) -> None:
    start = placed_tasks(remotes).start(remotes[0], "/here", 12.5)
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
        monkeypatch.setattr(agents_run, "Outlet", lambda: Outlet(1, theirs))
        server, *workers = placed_tasks(remotes, environ).tasks[1:]
    told = {"KVSTORE_COLUMNS": str(screen.COLUMNS), "NO_COLOR": "1"}
    assert all(told.items() <= worker.env.items() for worker in workers)
    assert "KVSTORE_COLUMNS" not in server.env


# ---- agents that a manager starts and that come back: too many, too few, and strangers. The manager is a shell


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
    monkeypatch.setattr(processes, "given_files", None)
    monkeypatch.chdir(tmp_path)
    with open_files.at_most(300) as hard:
        manager = 'ulimit -S -n >limit; for i in 0 1; do PMI_RANK=$i sh -c "$AGENT" & done; wait'
        assert launch(1, manager) == 0
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, processes.MAX_FILES), hard)
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
