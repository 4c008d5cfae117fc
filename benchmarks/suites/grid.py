"""Rounds on n hosts with k workers each, beside all-reduces of n × k ranks and beside what the wire allows.

Jobs start as users start them: ours by ``launch.py`` over ssh, with a server on each host, default threads and keys.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from benchmarks.contenders import Contender, Gloo, Limit, Samples, Work
from benchmarks.figures import Result, curve_of
from benchmarks.hosts import hosts, line
from benchmarks.jobs import JobFailed
from benchmarks.networks import elements, shapes_of
from benchmarks.remote import SETTINGS, Launched, OpenMpi
from benchmarks.session import Case, Session
from benchmarks.ssh import Ssh, logins
from benchmarks.wire import host_bytes, wire_ms

HOSTS = (2, 4)
WORKERS = (1, 2, 4)
RATE = "200mbit"  # so slow that two cores are not the limit
NET = "10MB"
ROUNDS = 5
LEAST = 10  # compressed, a host sends a quarter; where nothing crosses, next to nothing
PEERS = ("gloo", "openmpi", "wire")


class Sender(Contender, Protocol):
    """A contender that counts what the first host has sent in a round, in bytes, for each of its runs."""

    @property
    def sent(self) -> list[float]:
        """The counts."""


@dataclass(frozen=True)
class Crossing:
    """A sender that fails if hardly anything crossed the wire, for the hosts are not separate then.

    Attributes:
        sender: who does the work.
        allowed: what a host sends in a round if one gradient leaves it.
    """

    sender: Sender
    allowed: float

    @property
    def name(self) -> str:
        """The sender's name."""
        return self.sender.name

    def run(self) -> Samples:
        """See ``Contender``."""
        samples = self.sender.run()
        sent = self.sender.sent[-1]
        if sent < self.allowed / LEAST:
            raise JobFailed(
                f"a host sent {sent / 1e6:,.1f} MB a round, and its part is {self.allowed / 1e6:,.1f}: "
                "the hosts are not separate, and this is no measurement of the wire"
            )
        return samples

    @property
    def note(self) -> str:
        """How much was sent, in words."""
        sent = statistics.mean(self.sender.sent)
        return f"a host sent {sent / 1e6:,.1f} MB a round, {sent / self.allowed:.2f} × its part"


@dataclass(frozen=True)
class Grid:
    """What to measure.

    Attributes:
        hosts: the numbers of hosts.
        workers: the numbers of workers on each host.
        rate: how much each host may send, in the words of ``tc``.
        net: whose arrays, as ``shapes_of`` knows it.
        also: names in ``SETTINGS``, each for a row of ours besides the one with the defaults.
    """

    hosts: Sequence[int] = HOSTS
    workers: Sequence[int] = WORKERS
    rate: str = RATE
    net: str = NET
    also: Sequence[str] = ()

    @property
    def nbytes(self) -> int:
        """The bytes of all parameters."""
        return 4 * elements(shapes_of(self.net))

    def name(self, count: int, workers: int) -> str:
        """Return the name of one result, which says everything that it depends on."""
        return f"hosts-{count}x{workers}-{self.net}-{self.rate}"


def asked(session: Session) -> Grid:
    """Return the grid that the options ask for."""
    options = session.options
    return Grid(
        options.hosts or HOSTS,
        options.workers_per_host or WORKERS,
        options.rate or RATE,
        options.net or NET,
        options.also,
    )


def grid(session: Session, chosen: Grid) -> None:
    """Measure every number of hosts with every number of workers on each; a curve for each number of hosts.

    Raises:
        Unavailable: this machine cannot make hosts, or has no OpenSSH.
    """
    for count in chosen.hosts:
        with hosts(count, chosen.rate, session.options.mtu) as places, logins(places) as ssh:
            measured = {float(workers): _measure(session, chosen, ssh, workers) for workers in chosen.workers}
        if len(measured) > 1:
            title = f"A round on {count} hosts of {chosen.rate} against workers on each, {chosen.net}"
            name = f"hosts-{count}-{chosen.net}-{chosen.rate}"
            session.add_curve(curve_of(name, title, "workers a host", measured, logarithmic=False))


def note_sent(senders: Sequence[Crossing], result: Result) -> None:
    """Note beside each sender how much crossed the wire."""
    for one in senders:
        row = result.row(one.name)
        if row is not None:
            row.note = one.note


def _measure(session: Session, chosen: Grid, ssh: Ssh, workers: int) -> Result:
    count = len(ssh.places)
    work = Work(chosen.net, workers=count * workers, servers=count, rounds=session.options.rounds or ROUNDS)
    senders: list[Sender] = [Launched(work, ssh), *(Launched(work, ssh, SETTINGS[name]) for name in chosen.also)]
    if "gloo" in session.peers:
        senders.append(Gloo(work, [place for place in ssh.places for _ in range(workers)]))
    if "openmpi" in session.peers:
        senders.append(OpenMpi(work, session.peers, ssh))
    part = host_bytes(chosen.nbytes, count)
    crossing = [Crossing(sender, part) for sender in senders]
    wire = Limit("wire", wire_ms(chosen.nbytes, count, chosen.rate))
    where = f"{count} hosts of {line(chosen.rate, session.options.mtu)}, on each a server and {workers} workers"
    title = f"{chosen.net}, {where}; wire: {part / 1e6:,.1f} MB, 2·M·(n-1)/n, from each host"
    finish = partial(note_sent, crossing)
    return session.measure(Case(chosen.name(count, workers), title, [*crossing, wire], PEERS, finish))
