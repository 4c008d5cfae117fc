"""Training whose workers are killed and started again: which part of the samples of an undisturbed job count."""

from __future__ import annotations

import functools
import itertools
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contenders import program
from benchmarks.figures import Result, Row
from benchmarks.jobs import TIMEOUT_S, JobFailed, Member, Unavailable, run, scratch
from benchmarks.programs.learner import INNER_STEPS
from benchmarks.session import Session

WORKERS, SERVERS = 4, 2
SECONDS = 120  # that a job trains
FIRST_S = 15.0  # from the start to the first kill
AFTER_S = 8.0  # torchft takes 5 s to find that a learner is dead
WANTED_PAUSE_MS = 300.0


@dataclass(frozen=True)
class Way:
    """What is trained, and how.

    Attributes:
        title: of its results.
        work, way: see ``benchmarks.programs.learner``.
        step_s: how long a step takes.
        every_s: from one kill to the next.
        wanted: the least part of the samples that is to count.
        peer: whether torchft does the same.
    """

    title: str
    work: str
    way: str
    step_s: float
    every_s: float
    wanted: float
    peer: bool = False

    def kills(self, seconds: int) -> int:
        """Return how many workers are killed in a job. The last one can come back before the end."""
        return int((seconds - self.every_s) // self.every_s)


WAYS = {
    "sync": Way("the character model, synchronous, one of four workers killed every 10 s", "characters", "sync",
                0.1, 10.0, 0.9, peer=True),
    "resnet8": Way("ResNet-8, synchronous, one of four workers killed every 10 s", "digits", "sync", 0.25, 10.0, 0.9),
    "diloco": Way("DiLoCo, one of four learners killed every second round, one at half speed", "characters", "diloco",
                  0.2, 2 * INNER_STEPS * 0.2, 0.88),
}  # fmt: skip
SLOW = WORKERS - 1  # whose steps take twice as long in ``diloco``


def deaths(session: Session) -> None:
    """Run each way undisturbed and disturbed; compare the samples that count in a second, losses and pauses."""
    seconds = session.options.rounds or SECONDS
    for name, way in WAYS.items():
        contenders = {"kvstore": _ours}
        if way.peer and "torchft" in session.peers:
            contenders["torchft"] = functools.partial(_torchft, session)
        ended = {each: _both(session, each, way, seconds, start) for each, start in contenders.items()}
        pairs = {each: pair for each, pair in ended.items() if pair is not None}
        if "kvstore" not in pairs:
            continue
        rows = [
            Row(each, [killed.rate / calm.rate], f"{way.kills(seconds)} kills; {killed.samples:,} samples")
            for each, (calm, killed) in pairs.items()
        ]
        title = f"Samples in a second, of those of an undisturbed job: {way.title}"
        session.add(Result(f"deaths-{name}", title, [*rows, Row("wanted", [way.wanted])], ("wanted",), ""))
        rows = [Row("undisturbed", [pairs["kvstore"][0].loss]), Row("killed", [pairs["kvstore"][1].loss])]
        session.add(Result(f"deaths-{name}-loss", f"The held-out loss after {seconds} s", rows, ("undisturbed",), ""))
        if way.way == "sync":
            rows = [
                Row(each, killed.pauses, f"at most {max(killed.pauses):,.0f}")
                for each, (_, killed) in pairs.items()
                if killed.pauses
            ]
            title = "How much longer than a step a survivor waits for the next, at most, when a worker is killed"
            rows.append(Row("wanted", [WANTED_PAUSE_MS]))
            session.add(Result(f"deaths-{name}-pause", title, rows, ("torchft", "wanted")))


@dataclass(frozen=True)
class Ended:
    """What has become of a job.

    Attributes:
        samples: how many have counted.
        rate: how many of them in a second, from the first to the last.
        loss: on samples that were held out.
        pauses: for each kill, by how many milliseconds the longest step of a survivor after it was longer than usual.
    """

    samples: int
    rate: float
    loss: float
    pauses: Sequence[float]


Start = Callable[[Way, int, int, Path, Path], Member]


def _both(session: Session, name: str, way: Way, seconds: int, start: Start) -> tuple[Ended, Ended] | None:
    ended = []
    for kills in (0, way.kills(seconds)):
        label = f"{name}, {way.way} of {way.work}, {kills} kills"
        try:
            with session.console.status(f"{label}: {seconds} s"), scratch() as folder:
                path = folder / "report"
                figures = run([start(way, seconds, kills, folder, path)], path, seconds + TIMEOUT_S)
                noted = [_noted(file) for file in sorted(folder.glob("samples-*"))]
        except (JobFailed, Unavailable) as error:
            session.fail(label, error)
            return None
        counted = [line for lines in noted for line in lines if line[1]]
        times, samples = [at for at, _ in counted], sum(count for _, count in counted)
        pauses = [1000 * (each - way.step_s) for each in _longest_steps(noted)]
        ended.append(Ended(samples, samples / (max(times) - min(times)), figures["loss"], pauses))
    calm, killed = ended
    return calm, killed


def _noted(file: Path) -> list[tuple[float, int]]:
    """Return when a worker had how many samples counted; none where a process of its started."""
    return [(float(at), int(count)) for at, count in map(str.split, file.read_text().splitlines())]


def _longest_steps(noted: Sequence[Sequence[tuple[float, int]]]) -> list[float]:
    """Return for each death the longest time from one step of a survivor to its next; a process's first has none."""
    longest = []
    for worker, lines in enumerate(noted):
        deaths = [before for (before, _), (_, count) in itertools.pairwise(lines) if not count]
        for death in deaths:
            steps = [
                after - before
                for other, others in enumerate(noted)
                for (before, _), (after, count) in itertools.pairwise(others)
                if other != worker and count and death < after < death + AFTER_S
            ]
            longest.extend([max(steps)] if steps else [])
    return longest


def _words(way: Way, seconds: int, folder: Path, report: Path) -> list[str]:
    words = ["--work", way.work, "--seconds", f"{seconds}", "--step-s", f"{way.step_s}"]
    return [*words, "--folder", str(folder), "--report", str(report)]


def _ours(way: Way, seconds: int, kills: int, folder: Path, report: Path) -> Member:
    """A job of ``launch.py``, which kills the workers in turn and starts them again."""
    command = [*program("learner"), "--way", way.way, *_words(way, seconds, folder, report)]
    command += ["--slow", f"{SLOW}"] if way.way == "diloco" else []
    job = [sys.executable, "-m", "launcher", "-n", f"{WORKERS}", "-s", f"{SERVERS}", "--launcher", "local"]
    job += ["--min-workers", "1", "--restarts", "1000"]
    for number in range(kills):
        job += ["--inject", f"kill:worker:{number % WORKERS}@{FIRST_S + number * way.every_s:g}s"]
    return Member("launch.py", [*job, shlex.join(command)], {"OMP_NUM_THREADS": "1"})


def _torchft(session: Session, way: Way, seconds: int, kills: int, folder: Path, report: Path) -> Member:
    """The same by torchft: a replica group for each worker."""
    command = [session.peers.torchft(), "-m", "benchmarks.programs.torchft_job", "--workers", f"{WORKERS}"]
    command += ["--kills", f"{kills}", "--first-s", f"{FIRST_S:g}", "--every-s", f"{way.every_s:g}"]
    return Member("torchft", [*command, *_words(way, seconds, folder, report)], {"OMP_NUM_THREADS": "1"})
