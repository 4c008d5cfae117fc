"""Servers with standbys, killed at random while workers count every push; and how long the next round takes.

A run is exact if each push counts once, and every kill but those of workers is survived. Stores with rounds must end
with the bits of an undisturbed run of as many rounds.
"""

from __future__ import annotations

import random
import re
import signal
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from faults.counting import counting
from faults.plan import Plan
from faults.processes import running

START_S = 60.0  # for a job to begin, or a rank to heal
END_S = 60.0
FEW = 20  # rounds that go on after the last kill
SEATS = ("server", "standby")
HEALED = "is in step again"  # what the scheduler says of a new standby


class Job(Protocol):
    """A job whose processes can be killed."""

    @property
    def output(self) -> str: ...

    @property
    def directory(self) -> Path:
        """Where its workers write; see ``counting.py``."""
        ...

    def pid(self, name: str) -> int | None: ...

    def send(self, name: str, number: int) -> None: ...

    def move(self, name: str) -> None:
        """Have a server or standby start anew elsewhere, without a loss."""
        ...

    def reap(self) -> None: ...

    def wait(self, seconds: float) -> list[str]: ...


@dataclass(frozen=True)
class Kills:
    """What is done in one run.

    Attributes:
        seed: of all of it.
        kind: of links: ``unix``, ``shm``, ``tcp`` or ``curve``.
        mode: of the store, see ``counting.STORES``.
        kills: how many.
        whom: roles of which somebody is killed.
        stop_s: processes are stopped for so long instead of killed; 0 to kill.
        move: servers and standbys are moved instead of killed.
        mean_s: from the moment in which all ranks have healed to the next kill.
    """

    seed: int
    kind: str
    mode: str
    kills: int
    whom: tuple[str, ...] = SEATS
    stop_s: float = 0.0
    move: bool = False
    mean_s: float = 0.3


@dataclass
class Result:
    """What became of it.

    Attributes:
        wrong: what is wrong; empty if nothing is.
        rounds: that each worker has made.
        bits: at the end, of all workers.
        after_s: of each kill of a process that served, the seconds until the end of the first round that began after
            it, for the slower worker.
        others_s: the same of all other kills.
        output: what the processes have said.
    """

    wrong: str
    rounds: int
    bits: set[str]
    after_s: list[float]
    others_s: list[float]
    output: str


def carry_out(kills: Kills) -> Result:
    """Start a job of forks, kill, and wait for its end."""
    plan = replace(Plan.of(kills.seed, kills.kind), faults=(), mode="sync")
    work = partial(_work, kills.mode)
    with running(plan, work, replicas=1) as processes:
        return drive(processes, kills, plan.workers, plan.servers)


def undisturbed(kills: Kills, rounds: int) -> set[str]:
    """The bits at the end of a run of so many rounds without kills and standbys."""
    plan = replace(Plan.of(kills.seed, kills.kind), faults=(), mode="sync")

    def work(directory: Path) -> None:
        (directory / "stop").write_text(f"{rounds}")
        _work(kills.mode, directory)

    with running(plan, work) as processes:
        left = processes.wait(START_S + END_S)
        return _bits(processes.output) if not left else {"it did not end"}


def _work(mode: str, directory: Path) -> None:
    counting(directory, mode).run()


def drive(job: Job, kills: Kills, workers: int = 2, servers: int = 2) -> Result:
    """Kill who is to be killed in a job that has just been started; wait for its end; judge."""
    return _Drive(job, kills, workers, servers).run()


class _Drive:
    def __init__(self, job: Job, kills: Kills, workers: int, servers: int) -> None:
        self._job = job
        self._kills = kills
        self._workers = workers
        self._dice = random.Random(f"kills {kills.seed} {kills.kind} {kills.mode}")
        self._serving = dict.fromkeys(range(servers), "server")
        self._healed = 0
        self._killed: list[tuple[float, bool]] = []  # when, and whether it served

    def run(self) -> Result:
        job = self._job
        trouble = "" if self._until(lambda: min(self._progress()) > FEW, START_S) else "it did not begin"
        for _ in range(self._kills.kills):
            trouble = trouble or self._kill()
        (job.directory / "stop.new").write_text(f"{max(self._progress()) + FEW * 5}")
        (job.directory / "stop.new").rename(job.directory / "stop")
        left = job.wait(5.0 if trouble else END_S)
        return self._judge(trouble, left)

    def _kill(self) -> str:
        """Kill somebody, and wait until the job has healed; return what is wrong."""
        self._until(lambda: False, self._dice.expovariate(1 / self._kills.mean_s))
        role, rank = self._dice.choice(self._kills.whom), self._dice.randrange(len(self._serving))
        name = f"{role} {rank if role in SEATS else 0}"
        pid, before = self._job.pid(name), min(self._progress())
        self._killed.append((time.monotonic(), role in SEATS and self._serving[rank] == role))
        if self._kills.move:
            self._job.move(name)
        else:
            self._job.send(name, signal.SIGSTOP if self._kills.stop_s else signal.SIGKILL)
        if self._kills.stop_s:
            self._until(lambda: False, self._kills.stop_s)
            self._job.send(name, signal.SIGCONT)
        who = f"{name} (process {pid}) was lost, and"
        if role in SEATS:
            if self._serving[rank] == role:
                self._serving[rank] = SEATS[1 - SEATS.index(role)]
            self._healed += 1
            if not self._until(lambda: self._job.output.count(HEALED) >= self._healed, START_S):
                return f"{who} its rank has not healed"
        elif not self._until(lambda: self._job.pid(name) not in (None, pid), START_S):
            return f"{who} was not started again"
        well = self._until(lambda: min(self._progress()) > before + 2, START_S)
        return "" if well else f"{who} no round was made after that"

    def _judge(self, trouble: str, left: list[str]) -> Result:
        output = self._job.output
        made = [int(number) for number in re.findall(r"exact after (\d+) rounds", output)]
        result = Result(trouble, max(made, default=0), _bits(output), [], [], output)
        if "Wrong:" in output:
            result.wrong = "a value was wrong: " + re.findall(r"Wrong: .*", output)[0]
        elif not trouble and left:
            result.wrong = f"{', '.join(left)} had not ended"
        elif not trouble and len(made) < self._workers:
            result.wrong = f"{len(made)} workers have finished"
        elif not trouble and len(result.bits) > 1:
            result.wrong = "workers have other bits than others"
        paths = sorted(self._job.directory.glob("times-*"))
        rounds = [_rounds(path) for path in paths]
        for at, served in self._killed:
            ends = [next((end for began, end in own if began > at), None) for own in rounds]
            known = [end - at for end in ends if end is not None]
            if len(known) == self._workers:
                (result.after_s if served else result.others_s).append(max(known))
        return result

    def _progress(self) -> list[int]:
        paths = [self._job.directory / f"round-{rank}" for rank in range(self._workers)]
        return [int(path.read_bytes() or b"0") if path.exists() else 0 for path in paths]

    def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() >= deadline:
                return False
            self._job.reap()
            time.sleep(0.005)
        return True


def _rounds(path: Path) -> list[tuple[float, float]]:
    times = array("d", path.read_bytes())
    return list(zip(times[::2], times[1::2], strict=True))


def _bits(output: str) -> set[str]:
    return set(re.findall(r"exact after \d+ rounds: ([0-9a-f]+)", output))
