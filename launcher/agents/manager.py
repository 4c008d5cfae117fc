"""Agents that a cluster manager starts, one for each process. They connect to launch.py and then get their roles."""

from __future__ import annotations

import re
import selectors
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from kvstore.job.contract import Member
from kvstore.job.processes import allow_many_files
from launcher.agents.fleet import Carrier, RemoteAgent
from launcher.agents.links.link import AgentTicket
from launcher.agents.links.protocol import Bye, Hello
from launcher.agents.remote_run import Recruiter
from launcher.agents.roll_call import RollCall
from launcher.errors import LaunchError
from launcher.hosts import reach
from launcher.job.description import Job

if TYPE_CHECKING:
    from launcher.agents.links.hub import Hub, HubLink

NOTICE_S = 30.0
_SETTLE_S = 1.0
_PARTING_S = 0.2
_SILENCE_S = 20.0  # of an agent that waits for the others; it is pinged every 5 s
_TROUBLE_S = 3.0
# What ssh prints if it cannot reach a host. A manager that runs ssh may wait for ever, as MPICH's does.
_TROUBLE = re.compile(
    r"ssh: (connect to host|Could not resolve hostname) |Host key verification failed|Permission denied \(|"
    r"Connection (closed|reset) by |kex_exchange_identification"
)


class ManagerRecruiter(Recruiter):
    """Has a cluster manager start one agent for each worker, server and standby.

    Servers go to the hosts in turn, their standbys to other hosts, and workers get the other agents, all in the order
    of the manager's ranks.

    Args:
        name: the name of the manager's command.
        submit: starts that command, which runs as long as the agents and gives each of them the ticket.
        toward: a host that reaches this one by the same route as the agents; empty if none is known.
        patience_s: how long all agents may take to connect, in seconds; None for a queue, where there is no limit.
        cancel: cancels what `submit` has submitted, in case ending the command does not.
    """

    def __init__(
        self,
        job: Job,
        name: str,
        submit: Callable[[AgentTicket], Carrier],
        *,
        toward: str = "",
        patience_s: float | None = 60.0,
        cancel: Callable[[], None] = lambda: None,
    ) -> None:
        self._job, self._name = job, name
        self._submit, self._cancel = submit, cancel
        self._toward, self._patience_s = toward, patience_s
        self._hub: Hub | None = None
        self._carrier: Carrier | None = None
        self._remotes: list[RemoteAgent] = []
        self._full = False
        self._trouble: tuple[float, str] | None = None

    def recruit(self, roll_call: RollCall, selector: selectors.BaseSelector) -> Sequence[RemoteAgent]:
        from launcher.agents.links.hub import Hub  # imported late: launch.py starts without ZeroMQ

        self._selector = selector
        cluster = self._job.cluster
        self._own_address = reach.address(host=cluster.host_ip, interface=cluster.interface, toward=self._toward).ip
        allow_many_files()  # strangers may connect, too, until they are refused
        self._hub = Hub(self._own_address)
        self._hub.open(selector, self._welcome)
        self._carrier = self._submit(self._hub.ticket)
        self._carrier.open(selector)
        self._carrier.relay(self._relay)
        self._wait(roll_call)
        self._full = True
        connected = self._connected()
        for remote in connected[self._wanted :]:
            remote.send(Bye())
        hellos = [(hello, remote) for remote in connected[: self._wanted] if (hello := remote.said(Hello)) is not None]
        ordered = []
        for hello, remote in sorted(hellos, key=lambda item: item[0].rank):
            remote.host = hello.host
            ordered.append(remote)
        dealt = deal([remote.host for remote in ordered], self._job.num_servers, self._job.num_standbys)
        for remote, member in zip(ordered, dealt, strict=True):
            remote.members = [member]
        return ordered

    def toward(self) -> str:
        return self._toward or self._own_address

    def close(self, patience: float) -> None:
        if self._carrier is not None:
            lost = any(remote.lost is not None and not remote.left for remote in self._remotes)
            how = self._carrier.wait(0.0 if lost else patience)
            if how is None or how.status:
                self._cancel()
            self._carrier.close(_PARTING_S)
        if self._hub is not None:
            self._hub.close()

    @property
    def _wanted(self) -> int:
        return self._job.num_placed

    def _relay(self, line: str) -> None:
        print(f"launch.py: {self._name}: {line}", file=sys.stderr)
        if self._trouble is None and _TROUBLE.search(line):
            self._trouble = (time.monotonic(), line)

    def _welcome(self, link: HubLink) -> None:
        if self._full:  # one more than needed, or one that was given up
            link.send(Bye())
            link.close()
            return
        remote = RemoteAgent("a host", link, self._carrier)
        remote.open(self._selector)
        self._remotes.append(remote)

    def _wait(self, roll_call: RollCall) -> None:
        began = noticed = time.monotonic()
        assert self._carrier is not None  # noqa: S101 (for the type checker)
        while not roll_call.wait(self._settled, _SETTLE_S, lambda: self._remotes):
            now = time.monotonic()
            if self._trouble is not None and now > self._trouble[0] + _TROUBLE_S:
                raise LaunchError(f"{self._name} cannot reach all hosts: {self._trouble[1]}", exit_code=1)
            if (patience := self._patience_s) is not None and now >= began + patience:
                raise LaunchError(
                    f"only {self._count()} connected within {patience:g} s; the others did not start, or do not reach "
                    f"this machine at {self._own_address}: choose another address with --host-ip or --interface",
                    exit_code=1,
                )
            if now >= noticed + NOTICE_S:
                noticed = now
                print(f"launch.py: {self._count()} have started", file=sys.stderr)
        if len(self._connected()) < self._wanted:
            self._fail(self._carrier)

    def _settled(self) -> bool:
        assert self._carrier is not None  # noqa: S101 (for the type checker)
        return len(self._connected()) >= self._wanted or bool(self._gone()) or self._carrier.poll() is not None

    def _fail(self, carrier: Carrier) -> NoReturn:
        how = carrier.wait(_SETTLE_S)
        status = how.status if how is not None and how.status else 1
        if how is None:
            hosts = ", ".join(sorted({hello.host for remote in self._gone() if (hello := remote.said(Hello))}))
            raise LaunchError(f"a process on {hosts} ended before all others had started", exit_code=status)
        raise LaunchError(f"{self._name} {how} after {self._count()} had started", exit_code=status)

    def _count(self) -> str:
        hosts = ", ".join(sorted({hello.host for remote in self._connected() if (hello := remote.said(Hello))}))
        return f"{len(self._connected())} of {self._wanted} processes" + (f" (on {hosts})" if hosts else "")

    def _connected(self) -> list[RemoteAgent]:
        gone = self._gone()
        return [remote for remote in self._remotes if remote.said(Hello) is not None and remote not in gone]

    def _gone(self) -> list[RemoteAgent]:
        now = time.monotonic()
        return [
            remote
            for remote in self._remotes
            if remote.said(Hello) is not None
            and (remote.lost is not None or remote.said(Bye) is not None or now > remote.heard + _SILENCE_S)
        ]


def deal(hosts: Sequence[str], num_servers: int, num_standbys: int = 0) -> list[Member]:
    """The roles of agents on these hosts, in their order. No I/O.

    Servers are spread over the hosts. The standby of each is on the next host that has an agent left, which is the same
    host only if no other one has.
    """
    free = {host: [index for index, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)}
    names = list(free)
    servers: list[int] = []
    while len(servers) < num_servers:
        for indices in free.values():
            if indices and len(servers) < num_servers:
                servers.append(indices.pop(0))
    standbys: list[int] = []
    for server in servers[:num_standbys]:
        after = names.index(hosts[server]) + 1
        standbys.append(next(free[host] for host in names[after:] + names[:after] if free[host]).pop(0))
    # By their places, as workers: on one host, ranks follow those of the manager.
    ranks = {index: rank for rank, index in enumerate(sorted(servers))}
    dealt: dict[int, Member] = {index: ("server", rank) for index, rank in ranks.items()}
    dealt.update((index, ("standby", ranks[server])) for server, index in zip(servers, standbys, strict=False))
    workers = (index for index in range(len(hosts)) if index not in dealt)
    dealt.update((index, ("worker", rank)) for rank, index in enumerate(workers))
    return [dealt[index] for index in range(len(hosts))]
