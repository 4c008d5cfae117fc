"""Training whose workers are killed and started again: which part of the samples of an undisturbed job count."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contenders import program
from benchmarks.figures import Result, Row
from benchmarks.jobs import TIMEOUT_S, JobFailed, Member, run, scratch
from benchmarks.programs.learner import INNER_STEPS, WAYS
from benchmarks.session import Session

WORKERS, SERVERS = 4, 2
SECONDS = 120  # that a job trains
STEP_S = {"sync": 0.1, "diloco": 0.2}
EVERY_S = {"sync": 10.0, "diloco": 2 * INNER_STEPS * STEP_S["diloco"]}  # from one kill to the next: two rounds
WANTED = {"sync": 0.9, "diloco": 0.88}
SLOW = WORKERS - 1  # whose steps take twice as long in ``diloco``
FIRST_S = 15.0  # from the start to the first kill
TITLES = {
    "sync": "synchronous, one of four workers killed every 10 s",
    "diloco": "DiLoCo, one of four learners killed every second round, one at half speed",
}


def deaths(session: Session) -> None:
    """Run each way undisturbed and disturbed; compare the samples that count in a second, and the losses."""
    seconds = session.options.rounds or SECONDS
    for way in WAYS:
        jobs = {"undisturbed": Learners(way, seconds), "killed": Learners(way, seconds, EVERY_S[way])}
        ended: dict[str, Ended] = {}
        for name, job in jobs.items():
            try:
                with session.console.status(f"{way}, {name}: {seconds} s"):
                    ended[name] = job.end()
            except JobFailed as error:
                session.fail(f"{way}, {name}", error)
        if len(ended) < len(jobs):
            continue
        goodput = ended["killed"].rate / ended["undisturbed"].rate
        note = f"{jobs['killed'].kills} kills; {ended['killed'].samples:,} samples"
        rows = [Row("kvstore", [goodput], note), Row("wanted", [WANTED[way]])]
        session.add(Result(f"deaths-{way}", f"Samples in a second, of those of an undisturbed job: {TITLES[way]}",
                           rows, ("wanted",), ""))  # fmt: skip
        rows = [Row(name, [each.loss]) for name, each in ended.items()]
        session.add(Result(f"deaths-{way}-loss", f"The held-out loss after {seconds} s", rows, ("undisturbed",), ""))


@dataclass(frozen=True)
class Ended:
    """What has become of a job.

    Attributes:
        samples: how many have counted.
        rate: how many of them in a second, from the first to the last.
        loss: on text that was held out.
    """

    samples: int
    rate: float
    loss: float


@dataclass(frozen=True)
class Learners:
    """A job that trains; ``every_s`` is how often one of its workers is killed, in turn, 0 for never."""

    way: str
    seconds: int
    every_s: float = 0.0

    @property
    def kills(self) -> int:
        """How many workers are killed. The last one can come back before the end."""
        return int((self.seconds - self.every_s) // self.every_s) if self.every_s else 0

    def end(self) -> Ended:
        """Run the job."""
        with scratch() as folder:
            path = folder / "report"
            figures = run([self._job(folder, path)], path, self.seconds + TIMEOUT_S)
            noted = [
                (float(at), int(count))
                for file in folder.glob("samples-*")
                for at, count in map(str.split, file.read_text().splitlines())
            ]
        times = [at for at, _ in noted]
        samples = sum(count for _, count in noted)
        return Ended(samples, samples / (max(times) - min(times)), figures["loss"])

    def _job(self, folder: Path, report: Path) -> Member:
        words = ["--way", self.way, "--seconds", f"{self.seconds}", "--step-s", f"{STEP_S[self.way]}"]
        words += ["--slow", f"{SLOW}"] if self.way == "diloco" else []
        command = [*program("learner"), *words, "--folder", str(folder), "--report", str(report)]
        job = [sys.executable, "-m", "launcher", "-n", f"{WORKERS}", "-s", f"{SERVERS}", "--launcher", "local"]
        job += ["--min-workers", "1", "--restarts", "1000"]
        for number in range(self.kills):
            job += ["--inject", f"kill:worker:{number % WORKERS}@{FIRST_S + number * self.every_s:g}s"]
        return Member("launch.py", [*job, shlex.join(command)], {"OMP_NUM_THREADS": "1"})
