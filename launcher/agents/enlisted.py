"""Agents that a cluster manager starts, one for each process: they connect back, and then get their roles."""

from __future__ import annotations

import selectors
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.address import choose
from kvstore.errors import ConfigError
from launcher.agents.carrier import Carrier
from launcher.agents.enlist import Ticket
from launcher.agents.muster import Muster
from launcher.agents.protocol import Hello
from launcher.agents.remote import Remote
from launcher.errors import LaunchError
from launcher.job import Job
from launcher.tasks import Role

if TYPE_CHECKING:
    from launcher.agents.hub import Hub, HubLink

_NOTICE_S = 30.0
_SETTLE_S = 1.0


@dataclass(frozen=True)
class Manager:
    """A cluster manager that starts agents.

    Args:
        name: what its command is called.
        submit: starts that command, which stays while the agents run; it is to give each the ticket.
        toward: a host whose way to this one the agents will use; empty if none is known.
        patience_s: how long until all agents are there; None for a queue, where it takes as long as it takes.
        cancel: ends what `submit` has brought about, if ending the command does not.
    """

    name: str
    submit: Callable[[Ticket], Carrier]
    toward: str = ""
    patience_s: float | None = 60.0
    cancel: Callable[[], None] = lambda: None


class Enlisted:
    """Recruits one agent for each worker and server; see `Recruiter`.

    Servers are dealt to the hosts in turn, and workers get the other agents, both in the order of the manager's ranks.
    """

    def __init__(self, job: Job, manager: Manager) -> None:
        self._job = job
        self._manager = manager
        self._hub: Hub | None = None
        self._carrier: Carrier | None = None
        self._remotes: list[Remote] = []

    def recruit(self, muster: Muster, selector: selectors.BaseSelector) -> Sequence[Remote]:
        """Have the manager start the agents, and wait for all of them."""
        from launcher.agents.hub import Hub  # only now: launch.py starts without ZeroMQ

        self._selector = selector
        self._hub = Hub(self._address())
        self._hub.open(selector, self._welcome)
        self._carrier = self._manager.submit(self._hub.ticket)
        self._carrier.open(selector)
        self._carrier.relay(lambda line: print(f"launch.py: {self._manager.name}: {line}", file=sys.stderr))
        self._wait(muster)
        hosts = [(remote.said(Hello), remote) for remote in self._remotes]
        ordered = [remote for hello, remote in sorted(hosts, key=lambda item: item[0].rank if item[0] else 0)]
        for remote in ordered:
            hello = remote.said(Hello)
            remote.host = hello.host if hello is not None else remote.host
        for remote, member in zip(ordered, deal([r.host for r in ordered], self._job.num_servers), strict=True):
            remote.members = [member]
        return ordered

    def prepare(self, muster: Muster, selector: selectors.BaseSelector) -> None:
        """Nothing: the manager's hosts share their files."""

    def toward(self) -> str:
        """What leads to the hosts."""
        return self._manager.toward or self._address()

    def close(self, patience: float) -> None:
        """End the manager's command, and what it has started."""
        if self._carrier is not None:
            self._carrier.close(patience)
        self._manager.cancel()
        if self._hub is not None:
            self._hub.close()

    def _address(self) -> str:
        cluster = self._job.cluster
        try:
            return choose(host=cluster.host_ip, interface=cluster.interface, toward=self._manager.toward).ip
        except ConfigError as error:
            text = str(error).replace("DMLC_NODE_HOST", "--host-ip").replace("DMLC_INTERFACE", "--interface")
            raise LaunchError(f"no address for this machine: {text}") from None

    def _welcome(self, link: HubLink) -> None:
        remote = Remote("a host", link, self._carrier)
        remote.open(self._selector)
        self._remotes.append(remote)

    def _wait(self, muster: Muster) -> None:
        wanted = self._job.num_workers + self._job.num_servers
        began = time.monotonic()
        assert self._carrier is not None  # noqa: S101 (for the type checker)
        carrier = self._carrier
        while True:
            patience = self._manager.patience_s
            waited = time.monotonic() - began
            step = _NOTICE_S if patience is None else min(_NOTICE_S, patience - waited)
            if muster.wait(lambda: self._there() >= wanted or carrier.poll() is not None, step, lambda: self._remotes):
                break
            if patience is not None and time.monotonic() - began >= patience:
                raise LaunchError(
                    f"{self._manager.name} has started {self._there()} of {wanted} processes in {patience:g} s, or "
                    f"they do not reach this machine at {self._address()}: name another of its addresses with "
                    "--host-ip or --interface",
                    exit_code=1,
                )
            print(f"launch.py: {self._there()} of {wanted} processes have been started", file=sys.stderr)
        if self._there() < wanted:
            how = carrier.wait(_SETTLE_S)
            raise LaunchError(
                f"{self._manager.name} {how} when {self._there()} of {wanted} processes had been started"
                + (f": {carrier.explanation}" if carrier.explanation else ""),
                exit_code=how.status if how is not None and how.status else 1,
            )

    def _there(self) -> int:
        return sum(remote.said(Hello) is not None for remote in self._remotes)


def deal(hosts: Sequence[str], num_servers: int) -> list[tuple[Role, int]]:
    """The roles of agents that run on these hosts, in their order: servers are spread over the hosts. Pure."""
    servers: set[int] = set()
    places = {host: [i for i, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)}
    while len(servers) < num_servers:
        for indices in places.values():
            if indices and len(servers) < num_servers:
                servers.add(indices.pop(0))
    roles: list[tuple[Role, int]] = []
    counts: dict[Role, int] = {"server": 0, "worker": 0}
    for index in range(len(hosts)):
        role: Role = "server" if index in servers else "worker"
        roles.append((role, counts[role]))
        counts[role] += 1
    return roles
