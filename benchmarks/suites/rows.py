"""Rounds with tables of rows on one machine, beside MXNet's row-sparse arrays: ``rows``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks import dmlc
from benchmarks.contenders import Contender, Limit, Samples, launched, ranks, threads_at
from benchmarks.dmlc import Layout
from benchmarks.jobs import HERE, run, scratch
from benchmarks.peers import Peers
from benchmarks.session import Case, Session

ROUNDS = 20
MANY = 100_000  # ids, of which 95,200 are different
FRESH = {"": "dist_sync", "-async": "dist_async"}
THERE = "rows that were there"


@dataclass(frozen=True)
class RowWork:
    """Rounds in which rows are pushed and pulled.

    Attributes:
        batch: how many random ids a round has.
        tables: among which 1 M rows of 64 float32 are divided.
        fresh: whether the rows of each round come for the first time. MXNet's are all there from the start.
        grows: whether the tables grow.
        push: whether rows are only pushed.
        array: whether they are rows of an array; then they are only pushed.
        optimizer, kind, workers, servers, rounds: see ``Work``.
    """

    batch: int = 8192
    tables: int = 1
    fresh: bool = False
    grows: bool = False
    push: bool = False
    array: bool = False
    optimizer: str = "sgd"
    kind: str = "dist_sync"
    workers: int = 2
    servers: int = 2
    rounds: int = ROUNDS

    @property
    def words(self) -> list[str]:
        """The options of a program that does this work."""
        size = ["--batch", str(self.batch), "--rounds", str(self.rounds)]
        return [*size, "--type", self.kind, "--optimizer", self.optimizer]


@dataclass(frozen=True)
class OurRows:
    """This project, started by its launcher."""

    work: RowWork
    name: str = "kvstore"

    def run(self) -> Samples:
        """See ``Contender``."""
        with scratch() as folder:
            path = folder / "report"
            work = self.work
            flags = {"--fresh": work.fresh, "--grows": work.grows, "--push": work.push, "--array": work.array}
            kind = [*(flag for flag, on in flags.items() if on), "--tables", str(work.tables)]
            words = [*work.words, *kind, "--report", str(path)]
            command = [sys.executable, "-m", "benchmarks.programs.rows", *words]
            return {self.name: run([launched(self.work.workers, self.work.servers, command, {})], path)["times"]}


@dataclass(frozen=True)
class MxnetRows:
    """MXNet 1.9.1, with a row-sparse array of the same shape."""

    work: RowWork
    peers: Peers
    name: str = "mxnet"

    def run(self) -> Samples:
        """See ``Contender``."""
        python = self.peers.mxnet()
        layout = Layout([HERE] * self.work.workers, [HERE] * self.work.servers)
        with scratch() as folder:
            path = folder / "report"
            command = [python, "-m", "benchmarks.programs.mxnet_rows", *self.work.words, "--report", str(path)]
            members = dmlc.members(layout, servers=[python, "-c", "import mxnet"], workers=command)
            return {self.name: run(members, path)["times"]}


@dataclass(frozen=True)
class EmbeddingSteps:
    """Training steps of DLRM with 26 tables.

    Attributes:
        who: ``ours``: tables on servers; ``ahead``: the same with ``lookahead``; ``ddp``: whole tables in each process,
            and torch's ``DistributedDataParallel``, by which gloo sums their sparse gradients.
        rounds: how many steps are counted.
        name: the name of its row.
    """

    who: str
    rounds: int
    name: str

    def run(self) -> Samples:
        """See ``Contender``."""
        with scratch() as folder:
            path = folder / "report"
            words = ["--who", self.who, "--rounds", str(self.rounds), "--report", str(path)]
            command = [sys.executable, "-m", "benchmarks.programs.embeddings", *words]
            if self.who == "ddp":
                places = [HERE] * 2
                members = ranks([*command, "--meet", str(folder / "meet")], places, threads_at("worker", places))
            else:
                members = [launched(2, 2, command, {})]
            return {self.name: run(members, path)["times"]}


def rows(session: Session) -> None:
    """Measure rounds of 8,160 rows and of 95,200, many tables beside one of the same bytes, and training."""
    for case in cases(session):
        session.measure(case)


def _fresh(name: str, size: str, there: RowWork, mxnet: Sequence[Contender]) -> Case:
    work = replace(there, fresh=True)
    contenders = [
        OurRows(work),
        OurRows(replace(work, tables=26), "26 tables"),
        OurRows(replace(work, grows=True), "growing"),
        OurRows(replace(work, grows=True, tables=26), "26 growing"),
        OurRows(there, THERE),
        OurRows(replace(there, grows=True, tables=26), f"{THERE}, 26 growing"),
        *mxnet,
    ]
    return Case(name, f"{size} that come for the first time, SGD, {there.kind}", contenders, [THERE])


def cases(session: Session) -> Sequence[Case]:
    """Return what is measured. The limits are of two cores."""
    options, peers = session.options, session.peers
    kinds = {"workers": options.workers, "servers": options.servers, "rounds": options.rounds or ROUNDS}
    work = replace(RowWork(), **kinds)
    of_kind = {kind: replace(work, kind=kind) for kind in ("dist_sync", "dist_async")}
    mxnet: dict[str, list[Contender]] = {
        kind: [MxnetRows(each, peers)] if "mxnet" in peers else [] for kind, each in of_kind.items()
    }
    size = f"8,160 rows of 64 floats, {work.workers} workers, {work.servers} servers"
    adam, many = replace(work, optimizer="adam"), replace(work, batch=MANY)
    return [
        Case("rows-sgd", f"{size}, SGD, dist_sync", [OurRows(work), *mxnet["dist_sync"]]),
        Case("rows-sgd-async", f"{size}, SGD, dist_async", [OurRows(of_kind["dist_async"]), *mxnet["dist_async"]]),
        Case("rows-adam", f"{size}, Adam, dist_sync", [OurRows(adam), Limit("10 ms", 10.0)], ["10 ms"]),
        Case("rows-many", "95,200 rows of 64 floats, SGD", [OurRows(many), Limit("45 ms", 45.0)], ["45 ms"]),
        Case(
            "rows-tables",
            f"{size}, SGD: in 26 tables, and in one",
            [OurRows(replace(work, tables=26), "26 tables"), OurRows(work, "one table")],
            ["one table"],
        ),
        Case(
            "rows-array",
            f"{size}, SGD, pushed alone: of an array, and of a table",
            [OurRows(replace(work, push=True, array=True), "an array"), OurRows(replace(work, push=True), "a table")],
            ["a table"],
        ),
        *(_fresh(f"rows-fresh{name}", size, of_kind[kind], mxnet[kind]) for name, kind in FRESH.items()),
        Case(
            "rows-dlrm",
            "A training step of DLRM, 26 tables of 40,000 rows of 16, batch 2,048, 2 workers, 2 servers",
            [
                EmbeddingSteps("ahead", work.rounds, "kvstore"),
                EmbeddingSteps("ours", work.rounds, "kvstore, no lookahead"),
                *([EmbeddingSteps("ddp", work.rounds, "ddp")] if "gloo" in peers else []),
            ],
            ["ddp"],
        ),
    ]
