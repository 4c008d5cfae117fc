"""Whether a straggler is named while the job runs, by the right cause, and nobody in even runs: ``straggler``.

Workers' rounds are light; see ``benchmarks.programs.straggler``. When rounds have run for a while, one worker becomes
50 ms late: in the reading of its input, in its backward pass, or because its host sends at 12.5 Mbit/s from then on.
The line of news that names it is taken from the scheduler's output, with the time at which it came.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from benchmarks import dmlc
from benchmarks.hosts import hosts, run
from benchmarks.jobs import HERE, ROOT, JobFailed, Member, Place, Unavailable, scratch
from benchmarks.session import Session

CAUSES = ("input", "backward", "network")
SHAPES = ((2, 0), (3, 0), (4, 0), (8, 0), (4, 2), (6, 2))  # workers, and aggregators
KINDS = ("dist_sync", "dist_ssp")
REPEATS = 20
EVEN_S = 15.0  # how long an even run is watched
BEFORE_S = 4.0  # of even rounds before one is late
LIMIT_S = 10.0  # within so many seconds it is to be named
START_S, END_S = 120.0, 30.0
FAST, SLOW = "1gbit", "12500kbit"
WORDS = {
    "input": "reads its input for longer",
    "backward": "computes for longer",
    "network": "messages take long to arrive",
}
NAMED = re.compile(
    r"\bworkers? (?P<first>\d+)(?:[\d, ]* and (?P<last>\d+))?(?:, which share an aggregator,)? (?:is|are) slow:"
)


@dataclass(frozen=True)
class Trial:
    """One run.

    Attributes:
        kind: of the store.
        workers, aggregators: how many there are.
        cause: why one is late: one of ``CAUSES``; empty for an even run.
        late: which worker.
    """

    kind: str
    workers: int
    aggregators: int
    cause: str
    late: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """Whom the news are to name: the workers that share a line, if that is slow."""
        if self.cause == "network" and self.aggregators:
            return tuple(rank for rank in range(self.workers) if self.host(rank) == self.host(self.late))
        return (self.late,)

    def host(self, worker: int) -> int:
        """Return which host a worker is on: the first is that of scheduler and servers."""
        return 1 + (worker % self.aggregators if self.aggregators else worker)

    def __str__(self) -> str:
        with_aggregators = f", {self.aggregators} aggregators" if self.aggregators else ""
        late = f"worker {self.late}: {self.cause}" if self.cause else "even"
        return f"{self.kind}, {self.workers} workers{with_aggregators}, {late}"


@dataclass(frozen=True)
class Naming:
    """What the scheduler has said.

    Attributes:
        seconds: after how long, from when the worker was late; in an even run from the first rounds.
        line: the news; empty if nobody was named in time.
        right: whether that is what it should have said.
    """

    seconds: float
    line: str
    right: bool


def straggler(session: Session) -> None:
    """Run each cause, and even runs, with several numbers of workers; print how many were named rightly, and when."""
    repeats = session.options.repeats or REPEATS
    table = Table("cause", "runs", "right", "median s", "longest s", title="Stragglers of 50 ms, named while they run")
    for cause in (*CAUSES, ""):
        done: list[Naming] = []
        for trial in trials(cause, repeats):
            try:
                with session.console.status(str(trial)):
                    naming = carry_out(trial)
            except (JobFailed, Unavailable) as error:
                session.fail(str(trial), error)
                continue
            done.append(naming)
            verdict = "right" if naming.right else "WRONG"
            session.console.print(f"{verdict} after {naming.seconds:.1f} s: {trial}: {naming.line or 'nobody'}")
        times = sorted(naming.seconds for naming in done if naming.line) or [0.0]
        right = sum(naming.right for naming in done)
        table.add_row(cause or "even", f"{len(done)}", f"{right}", f"{times[len(times) // 2]:.1f}", f"{times[-1]:.1f}")
    session.console.print(table)


def trials(cause: str, count: int) -> Iterator[Trial]:
    """Return ``count`` runs over all shapes and kinds of store, with another worker late each time."""
    for number in range(count):
        workers, aggregators = SHAPES[number % len(SHAPES)]
        yield Trial(KINDS[number // len(SHAPES) % 2 ^ number % 2], workers, aggregators, cause, (number + 1) % workers)


def carry_out(trial: Trial, before_s: float = BEFORE_S, limit_s: float = LIMIT_S) -> Naming:
    """Run a job; return what its scheduler says.

    Args:
        trial: what to run.
        before_s: how long rounds are even.
        limit_s: within so many seconds the straggler is to be named.

    Raises:
        JobFailed: a process failed, or the rounds did not begin.
        Unavailable: the hosts cannot be made here.
    """
    with contextlib.ExitStack() as stack:
        places = [HERE] * (1 + trial.workers)
        if trial.cause == "network":
            places = stack.enter_context(hosts(1 + (trial.aggregators or trial.workers), FAST))
        folder = stack.enter_context(scratch())
        job = stack.enter_context(RunningJob(members(trial, places, folder)))
        job.wait_for(folder / "begun")
        if not trial.cause:
            return judged(trial, *job.next_name(EVEN_S))
        early = job.next_name(before_s)[1]
        if trial.cause == "network":
            _slow_down(places[trial.host(trial.late)])
        (folder / "late").touch()
        seconds, line = job.next_name(limit_s)
        return Naming(0.0, early, right=False) if early else judged(trial, seconds, line)


def judged(trial: Trial, seconds: float, line: str) -> Naming:
    """Return whether the news ``line``, empty for none, names whom it should, by the right cause."""
    found = NAMED.search(line)
    if not trial.cause or found is None:
        return Naming(seconds, line, found is None and not trial.cause)
    ranks = (int(found["first"]), *([int(found["last"])] if found["last"] else ()))
    who = ranks == (trial.ranks[0], *trial.ranks[1:][-1:])
    if trial.kind == "dist_ssp":  # pushes of one host come one after the other there: the last one is awaited alone
        who = set(ranks) <= set(trial.ranks)
    return Naming(seconds, line, who and WORDS[trial.cause] in line)


def members(trial: Trial, places: Sequence[Place], folder: Path) -> list[Member]:
    """Return the processes of a job: scheduler and two servers on the first place, workers on the others."""
    serve = [sys.executable, "-m", "servers"]
    work = [sys.executable, "-m", "benchmarks.programs.straggler", "--kind", trial.kind]
    for name in ("begun", "late", "end"):
        work += [f"--{name}", str(folder / name)]
    if trial.cause:
        work += ["--rank", str(trial.late), "--in", trial.cause]
    env = {"KVSTORE_NUM_AGGREGATORS": str(trial.aggregators), "OMP_NUM_THREADS": "1"}
    homes = [places[trial.host(rank)] for rank in range(trial.workers)]
    layout = dmlc.Layout(homes, [places[0]] * 2)
    made = dmlc.members(layout, servers=serve, workers=work, env=env)
    job = {**made[0].env, "DMLC_PS_ROOT_URI": places[0].address}
    with_host = []
    for member in made:
        own = {**member.env, "DMLC_PS_ROOT_URI": places[0].address}
        if member.env["DMLC_ROLE"] == "worker" and trial.aggregators:
            own["KVSTORE_AGGREGATOR"] = str(trial.host(int(member.env["DMLC_TASK_ID"])) - 1)
        place = places[0] if member.env["DMLC_ROLE"] == "scheduler" else member.place
        with_host.append(Member(member.name, member.argv, own, place))
    for number in range(trial.aggregators):
        place = places[1 + number]
        own = {**job, "DMLC_ROLE": "aggregator", "DMLC_TASK_ID": str(number), "KVSTORE_AGGREGATOR": str(number)}
        if place.namespace:
            own["DMLC_NODE_HOST"] = place.address
        with_host.append(Member(f"aggregator {number}", serve, own, place))
    return with_host


def _slow_down(host: Place) -> None:
    """Let a host send slowly from now on; what it may send at once is little."""
    bucket = ["rate", SLOW, "burst", "4000", "latency", "1s"]
    run("tc", "-n", host.namespace, "qdisc", "change", "dev", "eth0", "root", "tbf", *bucket)


class RunningJob:
    """The processes of a job, and what its scheduler says. At the end of the block they are ended.

    Args:
        members: of the job; the scheduler is the first.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        self._lines: queue.Queue[tuple[float, str]] = queue.Queue()

    def __enter__(self) -> RunningJob:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        base = {**{name: text for name, text in os.environ.items() if not name.startswith("DMLC_")}, "PYTHONPATH": path}
        for member in self._members:
            process = subprocess.Popen(
                member.place.wrap(member.argv),
                env={**base, **member.env},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            self._processes.append(process)
            self._readers.append(threading.Thread(target=self._read, args=(process, member.name), daemon=True))
            self._readers[-1].start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
            process.kill()
            process.wait()
        for reader, process in zip(self._readers, self._processes, strict=True):
            reader.join()
            if process.stderr is not None:
                process.stderr.close()

    def wait_for(self, path: Path) -> None:
        """Wait for a file.

        Raises:
            JobFailed: it does not come.
        """
        deadline = time.monotonic() + START_S
        while not path.exists():
            if time.monotonic() > deadline or any(process.poll() for process in self._processes):
                said = []
                while not self._lines.empty():
                    said.append(self._lines.get()[1])
                raise JobFailed("rounds did not begin: " + "".join(said)[-2000:])
            time.sleep(0.05)

    def next_name(self, seconds: float) -> tuple[float, str]:
        """Wait so long for a line that names a straggler; return after how many seconds it came, and the line."""
        began = time.monotonic()
        while (left := began + seconds - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                at, line = self._lines.get(timeout=left)
                if NAMED.search(line):
                    return at - began, line.strip()
        return seconds, ""

    def _read(self, process: subprocess.Popen[str], name: str) -> None:
        if process.stderr is not None:
            for line in process.stderr:
                self._lines.put((time.monotonic(), f"{name}: {line}" if "scheduler" not in name else line))
