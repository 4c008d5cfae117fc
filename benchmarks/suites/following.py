"""Followers of a job that trains: what its rounds take, which versions followers have, and 64 followers at once."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders import launched, program
from benchmarks.figures import Result, Row
from benchmarks.jobs import JobFailed, Member, run, scratch
from benchmarks.networks import elements, shapes_of
from benchmarks.session import Session
from benchmarks.suites.memory import MAY_GROW_MB, growth

NET = "small-decoder"
BLOCKS, ROUNDS = 5, 80
SHARES = (0.01, 1.0)
NAMES = {"nothing": "nothing published", "published": "nobody follows", "followed": "kvstore", "files": "safetensors"}
ACTOR_ROUNDS, COMPUTE_S = 80, 0.1
A_MINUTE = 50  # versions that an actor is to have
CROWD, CROWD_THREADS, CROWD_NET, CROWD_ROUNDS, CROWD_S = 64, 8, "4MB", 200, 2.0


def followers(session: Session) -> None:
    """Measure rounds with two followers, an actor beside a learner, and a crowd."""
    for part in (_rounds, _actor, _crowd):
        try:
            with session.console.status(part.__name__):
                part(session)
        except JobFailed as error:
            session.fail(part.__name__, error)


def _rounds(session: Session) -> None:
    """Measure rounds with nothing published, and with a version a second that nobody or two follow."""
    options = session.options
    for share in SHARES:
        words = ["--share", f"{share}", "--ways", "nothing", "published", "followed", "--blocks", f"{BLOCKS}"]
        job = Followed(tuple(words), options.net or NET, options.rounds or ROUNDS, servers=options.servers, readers=2)
        samples: dict[str, list[float]] = {}
        note = ""
        for _ in range(options.repeats or 1):
            figures, arrivals = job.report()
            for way, times in figures["times"].items():
                samples.setdefault(NAMES[way], []).extend(times)
            count = len(figures["versions"]["followed"])
            note = (
                f"the slower one had {min(_count(figures, 'followed', each) for each in arrivals)} of {count} versions"
            )
        rows = [Row(name, times, note if name == "kvstore" else "") for name, times in samples.items()]
        title = f"A round of {size(job.net)} that changes {share:.0%}, with a version a second and two followers"
        session.add(Result(f"followers-rounds-{100 * share:g}", title, rows, ("nothing published", "nobody follows")))


def _actor(session: Session) -> None:
    """Measure how often an actor has another version, beside two workers that compute, on all cores."""
    options = session.options
    for every in (0.0, 1.0):
        words = ["--every", f"{every}", "--compute-s", f"{COMPUTE_S}", "--ways", "nothing", "followed", "files"]
        job = Followed(tuple(words), options.net or NET, options.rounds or ACTOR_ROUNDS, servers=options.servers)
        between: dict[str, list[float]] = {"followed": [], "files": []}
        rounds: dict[str, list[float]] = {}
        for _ in range(options.repeats or 1):
            figures, (arrivals,) = job.report()
            for way, samples in between.items():
                span = figures["times"][way][0] * job.rounds
                samples.append(span / max(1, _count(figures, way, arrivals)))
            for way, times in figures["times"].items():
                rounds.setdefault(NAMES[way], []).extend(times)
        what = f"{size(job.net)}, all of which change, versions {'each second' if every else 'after each round'}"
        name = f"followers-actor-{'second' if every else 'round'}"
        rows = [
            Row(NAMES[way], samples, f"{60e3 / statistics.median(samples):.0f} a minute")
            for way, samples in between.items()
        ]
        rows.append(Row(f"{A_MINUTE} a minute", [60e3 / A_MINUTE]))
        session.add(Result(name, f"For each version that an actor has: {what}", rows, ("safetensors", rows[-1].name)))
        rows = [Row(name, times) for name, times in rounds.items()]
        session.add(Result(f"{name}-rounds", "The learner's rounds meanwhile", rows, ("nothing published",)))


def _crowd(session: Session) -> None:
    """Measure when the last of 64 followers, which share nothing, has each version, and what the servers hold."""
    options = session.options
    rows = []
    for readers in (1, CROWD):
        words = ["--every", f"{CROWD_S}", "--share", f"{SHARES[0]}", "--compute-s", f"{COMPUTE_S}"]
        words += ["--ways", "followed"]
        job = Followed(
            tuple(words), CROWD_NET, options.rounds or CROWD_ROUNDS, servers=options.servers, readers=readers,
            threads=min(readers, CROWD_THREADS), shm=False,
        )  # fmt: skip
        figures, arrivals = job.report()
        versions = {int(rounds): at for rounds, at in figures["versions"]["followed"].items()}
        least = min(_count(figures, "followed", each) for each in arrivals)
        last = [1000 * (max(each.get(rounds, math.inf) for each in arrivals) - at) for rounds, at in versions.items()]
        note = f"the slowest had {least} of {len(versions)} versions"
        rows.append(Row(f"{readers} follow", [each for each in last if each < math.inf], note))
        if least < len(versions):
            session.fail(f"{readers} follow", JobFailed(note))
    peers = (rows[0].name,)
    title = f"From publish to the last follower, over sockets: {size(CROWD_NET)}, {SHARES[0]:.0%} of which changes"
    session.add(Result("followers-crowd", title, rows, peers))
    servers = [[each[rank]["all"] for each in figures["memory"]] for rank in range(options.servers)]
    rows = [Row("largest growth", [max(map(growth, servers))], f"most: {max(map(max, servers)):,.0f} MB")]
    rows.append(Row("allowed", [MAY_GROW_MB]))
    session.add(
        Result("followers-crowd-memory", f"What a server with {CROWD} followers grew by", rows, ("allowed",), "MB")
    )


def size(net: str) -> str:
    """Describe the arrays of ``net``."""
    return f"{4e-6 * elements(shapes_of(net)):,.0f} MB"


def _count(figures: dict[str, Any], way: str, arrivals: dict[int, float]) -> int:
    """Return how many of the versions of blocks of that way a reader had."""
    return sum(int(rounds) in arrivals for rounds in figures["versions"][way])


@dataclass(frozen=True)
class Followed:
    """A job that trains, and readers that follow it. Its options are those of the program.

    Attributes:
        words: more options.
        readers, threads: how many readers there are, and how many of them share a process.
        shm: whether readers use shared memory, and share what they fetch.
    """

    words: tuple[str, ...]
    net: str
    rounds: int
    workers: int = 2
    servers: int = 2
    readers: int = 1
    threads: int = 1
    shm: bool = True

    def report(self) -> tuple[dict[str, Any], list[dict[int, float]]]:
        """Run the job once; return its report, and of each reader the time at which it had each version."""
        with scratch() as folder:
            path = folder / "report"
            words = ["--net", self.net, "--rounds", str(self.rounds), "--workers", str(self.workers), *self.words]
            words += ["--readers", str(self.readers), "--threads", str(self.threads)]
            command = [*program("followers"), *words, "--folder", str(folder), "--report", str(path)]
            job = launched(self.workers, self.servers, command, {})
            more = ["--readers", str(folder / "readers.json")]
            trains = Member(job.name, [*job.argv[:3], *more, *job.argv[3:]], job.env)
            env = {} if self.shm else {"KVSTORE_SHM": "0"}
            members = [
                Member(f"reader {first}", [*command, "--reader", str(first)], env)
                for first in range(0, self.readers, self.threads)
            ]
            figures = run([trains, *members], path)
            return figures, [held(folder / f"reader{reader}") for reader in range(self.readers)]


def held(path: Path) -> dict[int, float]:
    """Return when a reader had each version, by rounds."""
    return {int(rounds): float(at) for rounds, at in map(str.split, path.read_text().splitlines())}
