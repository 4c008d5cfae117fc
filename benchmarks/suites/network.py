"""Rounds and steps across hosts of 1 Gbit/s, where the wire is the limit, beside that limit.

Our rounds are those of a job that ``launch.py`` starts over ssh, with its defaults.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks import ssh
from benchmarks.contenders import Contender, Gloo, Limit, Mxnet, Samples, Steps, Work
from benchmarks.dmlc import Layout
from benchmarks.figures import Result, Row
from benchmarks.hosts import hosts, line, require, sent
from benchmarks.jobs import JobFailed, Place, Unavailable
from benchmarks.models import build
from benchmarks.networks import elements, shapes_of
from benchmarks.programs.steps import WARM_UP as STEPS_WARM_UP
from benchmarks.programs.stopwatch import WARM_UP
from benchmarks.remote import SETTINGS, Launched
from benchmarks.session import Case, Session
from benchmarks.suites.grid import Grid, asked, grid
from benchmarks.suites.training import ALONE, note_efficiency
from benchmarks.wire import bytes_a_ms, wire_ms

RATE = "1gbit"
ROUNDS = 5
STEPS = 10
BRIEF = Grid(hosts=(2,), workers=(4,))  # half a minute for each repeat


@dataclass(frozen=True)
class Counted:
    """A contender whose first host's sent bytes are counted, to be sure that data crossed the wire.

    Attributes:
        contender: who does the work.
        host: that of a worker.
        rounds: how many the work has.
        nbytes: what such a host must send in a round, about.
        warm_up: rounds that come before those.
        counts: what it has sent, for each turn.
    """

    contender: Contender
    host: Place
    rounds: int
    nbytes: float
    warm_up: int = WARM_UP
    counts: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The contender's name."""
        return self.contender.name

    def run(self) -> Samples:
        """See ``Contender``."""
        before = sent(self.host)
        samples = self.contender.run()
        count = sent(self.host) - before
        least = self.nbytes * (self.rounds + self.warm_up) / 2  # shares are not quite even
        if count < least:
            raise JobFailed(
                f"a worker's host sent {count / 1e6:,.0f} MB, and must have sent {least / 1e6:,.0f} at the very least: "
                "the hosts are not separate, and this is no measurement of the wire"
            )
        self.counts.append(count)
        return samples

    @property
    def note(self) -> str:
        """How much was sent, in words."""
        megabytes = sum(self.counts) / len(self.counts) / (self.rounds + self.warm_up) / 1e6
        return f"a worker's host sent {megabytes:,.0f} MB a round, what goes before the first included"


def network(session: Session, brief: bool = False) -> None:
    """Measure rounds on four hosts, on four with four for servers, on hosts with many workers; and training on two.

    If the options say what hosts there are to be, measure only rounds on those.

    Args:
        session: what is measured, and with what.
        brief: measure only what there is a target for.
    """
    try:
        require()
        ssh.require()
        if session.options.asks_for_hosts:
            grid(session, asked(session))
            return
        _rounds(session, "hosts-4", servers_apart=False)
        _rounds(session, "hosts-4+4", servers_apart=True)
        grid(session, BRIEF)
        _training(session, brief)
    except Unavailable as error:
        session.console.print(f"network: skipped: {error}", style="yellow", markup=False, highlight=False)


def _rounds(session: Session, name: str, servers_apart: bool, workers: int = 4) -> None:
    work = Work(workers=workers, servers=workers, rounds=session.options.rounds or ROUNDS)
    wire = Limit("wire", wire_ms(4 * elements(shapes_of(work.net)), workers, RATE, servers_apart))
    with contextlib.ExitStack() as stack:
        places = stack.enter_context(hosts(2 * workers if servers_apart else workers, RATE, session.options.mtu))
        layout = Layout(places[:workers], places[workers:] if servers_apart else places)
        logged = stack.enter_context(ssh.logins(places))
        contenders: list[Contender] = [
            Launched(work, logged, apart=places[workers:]),
            Launched(work, logged, SETTINGS["plain-one-thread"], places[workers:]),
        ]
        if "mxnet" in session.peers:
            contenders.append(Mxnet(work, session.peers, layout))
        if "gloo" in session.peers:
            contenders.append(Gloo(work, layout.workers))
        counted = [Counted(contender, places[0], work.rounds, wire.ms * bytes_a_ms(RATE)) for contender in contenders]

        where = f"{workers} worker hosts and {workers} server hosts" if servers_apart else f"{workers} hosts"
        title = f"ResNet-50's arrays, {where}, {line(RATE, session.options.mtu)}"
        session.measure(Case(name, title, [*counted, wire], ("mxnet", "gloo", "wire"), partial(note_bytes, counted)))


def note_bytes(counted: Sequence[Counted], result: Result) -> None:
    """Note beside each contender how much crossed the wire."""
    for one in counted:
        row = result.row(one.name)
        if row is not None:
            row.note = one.note


def _training(session: Session, brief: bool, model: str = "resnet18") -> None:
    steps = session.options.rounds or STEPS
    nbytes = 4 * sum(parameter.numel() for parameter in build(model).parameters())
    with hosts(2, RATE, session.options.mtu) as places:
        layout = Layout(places, places)
        wire = Limit("wire", wire_ms(nbytes, 2, RATE))
        sending = [Steps(model, "ours", steps, "kvstore", layout)]
        if not brief:
            sending.append(Steps(model, "forward", steps, "kvstore, waiting in forward", layout))
        if "gloo" in session.peers:
            sending.append(Steps(model, "ddp", steps, "ddp", layout))
        counted = [Counted(contender, places[0], steps, nbytes, STEPS_WARM_UP) for contender in sending]
        contenders: list[Contender] = [*counted, Steps(model, "alone", steps, ALONE), wire]
        where = f"a worker and a server, without keys, on each of 2 hosts, {line(RATE, session.options.mtu)}"
        title = f"A training step of ResNet-18, batch 16, {where}"
        session.measure(Case("hosts-train", title, contenders, ("ddp", "limit"), add_limit))


def add_limit(result: Result) -> None:
    """Add the limit of a step: 1.1 times the longer of computing and sending, plus what cannot overlap.

    That is the forward pass: before its end there is no gradient to send, and its beginning needs all the weights.
    """
    note_efficiency(result)
    alone, forward, wire = (result.row(name) for name in (ALONE, f"{ALONE}, forward only", "wire"))
    if alone and forward and wire:
        limit = 1.1 * max(alone.median, wire.median) + forward.median
        result.rows.append(Row("limit", [limit], "1.1 × the longer of alone and wire, + forward"))
