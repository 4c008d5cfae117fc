"""Contenders: each starts its processes for a piece of work, and reads their report."""

from __future__ import annotations

import os
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from benchmarks import dmlc
from benchmarks.dmlc import Layout
from benchmarks.hosts import INTERFACE
from benchmarks.jobs import HERE, Member, Place, run, scratch
from benchmarks.peers import Peers
from kvstore.job import threads
from kvstore.job.curve_keys import Keyring
from kvstore.job.system import cores

Samples = dict[str, list[float]]

# How a job's payloads travel; `auto` is what a user gets.
TRANSPORTS: Mapping[str, Mapping[str, str]] = {
    "auto": {},
    "sockets": {"KVSTORE_SHM": "0"},
    "tcp": {"KVSTORE_SHM": "0", "KVSTORE_TRANSPORT": "tcp"},
    "zeromq": {"KVSTORE_TRANSPORT": "zeromq"},
}


@dataclass(frozen=True)
class Work:
    """Rounds of push and pull.

    Attributes:
        net: whose arrays, as ``shapes_of`` knows it.
        workers, servers: how many.
        optimizer: ``none`` for sums, else what the servers update with.
        kind: the type of the store.
        rounds: how many are counted.
    """

    net: str = "resnet50"
    workers: int = 2
    servers: int = 2
    optimizer: str = "none"
    kind: str = "dist_sync"
    rounds: int = 10

    @property
    def words(self) -> list[str]:
        """The options of a program that does this work with a store."""
        return [*self.size, "--type", self.kind, "--optimizer", self.optimizer]

    @property
    def size(self) -> list[str]:
        """The options of a program that has no store."""
        return ["--net", self.net, "--rounds", str(self.rounds)]


class Contender(Protocol):
    """What is measured.

    Attributes:
        name: the name of its row.
    """

    @property
    def name(self) -> str:
        """The name of its row."""

    def run(self) -> Samples:
        """Run all rounds once; return the time of each in ms, by the name of the row.

        Raises:
            Unavailable: it cannot run here.
            JobFailed: it could not do the work.
        """


@dataclass(frozen=True)
class Ours:
    """This project, started by its launcher; or process by process on the hosts of ``layout``, optionally with keys."""

    work: Work
    memory: str = "ordinary"
    transport: str = "auto"
    layout: Layout | None = None
    name: str = "kvstore"
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    words: Sequence[str] = ()
    with_init: bool = False
    keys: bool = False

    def run(self) -> Samples:
        """See ``Contender``. With ``with_init``, the time of ``init`` has its own row."""
        figures = self.report()
        init = {f"{self.name}, init": [figures["init"]]} if self.with_init else {}
        return {self.name: figures["times"], **init}

    def report(self, sample_every: int = 0) -> dict[str, Any]:
        """Run the work; the report includes the servers' memory every ``sample_every`` rounds, unless that is 0."""
        with scratch() as folder:
            path = folder / "report"
            words = [*self.work.words, "--memory", self.memory, "--sample-every", str(sample_every), *self.words]
            command = [*program("rounds"), *words, "--report", str(path)]
            env = {**TRANSPORTS[self.transport], **self.env}
            if self.layout is None:
                return run([launched(self.work.workers, self.work.servers, command, env)], path)
            return run(placed(self.layout, command, env, self.keys), path)


@dataclass(frozen=True)
class Mxnet:
    """MXNet 1.9.1: ps-lite, in C++."""

    work: Work
    peers: Peers
    layout: Layout | None = None
    name: str = "mxnet"

    def run(self) -> Samples:
        """See ``Contender``."""
        python = self.peers.mxnet()
        layout = self.layout or Layout([HERE] * self.work.workers, [HERE] * self.work.servers)
        with scratch() as folder:
            path = folder / "report"
            command = [python, "-m", "benchmarks.programs.mxnet", *self.work.words, "--report", str(path)]
            members = dmlc.members(layout, servers=[python, "-c", "import mxnet"], workers=command)
            return {self.name: run(members, path)["times"]}


@dataclass(frozen=True)
class Gloo:
    """torch.distributed's all-reduce of one flat tensor. It only sums; there are no servers that update.

    Attributes:
        work: the rounds.
        places: of the ranks; this machine by default.
        sent: for each run the bytes that the first rank's host has sent in a round.
    """

    work: Work
    places: Sequence[Place] = ()
    name: str = "gloo"
    sent: list[float] = field(default_factory=list)

    def run(self) -> Samples:
        """See ``Contender``."""
        with scratch() as folder:
            path = folder / "report"
            words = [*self.work.size, "--report", str(path), "--meet", str(folder / "meet")]
            figures = run(ranks([*program("gloo"), *words], self.places or [HERE] * self.work.workers), path)
        self.sent.append(figures["sent"])
        return {self.name: figures["times"]}


@dataclass(frozen=True)
class Sockets:
    """Plain sockets: the limit of TCP on this machine."""

    work: Work
    name: str = "sockets"

    def run(self) -> Samples:
        """See ``Contender``."""
        with scratch() as folder:
            path = folder / "report"
            counts = ["-n", str(self.work.workers), "-s", str(self.work.servers)]
            command = [*program("sockets"), *self.work.size, *counts, "--report", str(path)]
            return {self.name: run([Member("sockets", command)], path)["times"]}


@dataclass(frozen=True)
class Steps:
    """Training steps.

    Attributes:
        model: one of ``MODELS``.
        who: ``alone``: one process; ``ours``: the ``Trainer``; ``forward``: the same with ``wait_in_forward``;
            ``ddp``: torch's ``DistributedDataParallel`` over gloo; ``group``: the same over our process group.
        rounds: how many steps are counted.
        layout: where workers and servers run; None for two of each on this machine.
        name: the name of its row.
    """

    model: str
    who: str
    rounds: int
    name: str
    layout: Layout | None = None

    def run(self) -> Samples:
        """See ``Contender``. The single process also reports the time of its forward pass."""
        with scratch() as folder:
            path = folder / "report"
            words = ["--who", self.who, "--model", self.model, "--rounds", str(self.rounds), "--report", str(path)]
            figures = run(self._members([*program("steps"), *words], folder), path)
        forward = {f"{self.name}, forward only": figures["forward"]} if figures["forward"] else {}
        return {self.name: figures["times"], **forward}

    def _members(self, command: list[str], folder: Path) -> list[Member]:
        if self.who == "alone":
            half = threads_at("worker", [HERE] * 2)  # of the cores, as each of two has
            return [Member("the process", command, half)]
        if self.who == "ddp":
            places = self.layout.workers if self.layout else [HERE] * 2
            return ranks([*command, "--meet", str(folder / "meet")], places, threads_at("worker", places))
        if self.layout is None:
            return [launched(2, 2, command, {})]
        return placed(self.layout, command, {})


@dataclass(frozen=True)
class Limit:
    """A computed limit, beside the measured figures."""

    name: str
    ms: float

    def run(self) -> Samples:
        """See ``Contender``."""
        return {self.name: [self.ms]}


def launched(workers: int, servers: int, command: Sequence[str], env: Mapping[str, str]) -> Member:
    """Return a whole job of ours on this machine, started as a user starts it."""
    job = [sys.executable, "-m", "launcher", "-n", str(workers), "-s", str(servers), "--launcher", "local"]
    return Member("launch.py", [*job, shlex.join(command)], env)


def placed(layout: Layout, command: Sequence[str], env: Mapping[str, str], keys: bool = False) -> list[Member]:
    """Return a whole job of ours on the hosts of ``layout``; with ``keys`` its links are encrypted.

    Each process has the threads that ``launch.py`` would give it there.
    """
    members = dmlc.members(layout, servers=[sys.executable, "-m", "servers"], workers=command, env=env)
    places = {"worker": layout.workers, "server": layout.servers, "scheduler": layout.workers[:1]}
    own = {role: threads_at(role, there, env) for role, there in places.items()}
    members = [replace(member, env={**own[member.env["DMLC_ROLE"]], **member.env}) for member in members]
    if not keys:
        return members
    ranks = [(member.env["DMLC_ROLE"], int(member.env["DMLC_TASK_ID"])) for member in members]
    keyring = Keyring.random(ranks)
    return [
        replace(member, env={**member.env, **keyring.variables(role, rank)})
        for member, (role, rank) in zip(members, ranks, strict=True)
    ]


def threads_at(role: str, places: Sequence[Place], env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables for threads that ``launch.py`` sets for members of a role, beside those in ``env``.

    Args:
        role: their role.
        places: of all its members. A host takes the cores for its own, though all hosts share them here.
        env: their variables.
    """
    siblings = max(Counter(places).values())
    return threads.variables({**os.environ, **(env or {})}, role, cores(), siblings)


def ranks(command: Sequence[str], places: Sequence[Place], env: Mapping[str, str] | None = None) -> list[Member]:
    """Return the processes of a torch.distributed job, one for each place."""
    made = []
    for rank, place in enumerate(places):
        own_env = {**(env or {}), "RANK": str(rank), "WORLD_SIZE": str(len(places))}
        if place.namespace:
            own_env["GLOO_SOCKET_IFNAME"] = INTERFACE
        made.append(Member(f"rank {rank}", command, own_env, place))
    return made


def program(name: str) -> list[str]:
    """Return the words that run one of ``benchmarks.programs``."""
    return [sys.executable, "-m", f"benchmarks.programs.{name}"]
