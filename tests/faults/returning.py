"""Workers that are killed, started again, and let in, while the job goes on.

Servers update all stores here, as they must where workers come back. Each worker has elements of its own, so that the
weights tell after each round who is in it. What each process has been acknowledged is in a file of its own, which
outlives it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kvstore as kv
from faults.plan import Plan
from faults.processes import Processes, running
from faults.training import BOUND, Wrong

START_S, END_S = 60.0, 60.0
WORKERS, KILLED = 4, 5  # of each run
FEW = 5  # rounds between two kills
BLOCK = 256  # elements that are never cut, and one worker's
SIZE = BLOCK * WORKERS * 30  # elements, on both servers
GRADIENT = 60.0  # so that its multiples by n/m are integers
STORES: dict[str, tuple[str, dict[str, Any]]] = {
    "sync": ("dist_sync", {}),
    "async": ("dist_async", {}),
    "ssp": ("dist_ssp", {"staleness": 3}),
    "drop": ("dist_sync", {"quorum": 2, "late": "drop"}),
    "rows": ("dist_sync", {}),
    "rows-async": ("dist_async", {}),
}


class Returning:
    """One worker, of which each process pushes until the file ``stop`` says that it is enough."""

    def __init__(self, directory: Path, mode: str, phases: bool) -> None:
        began = time.monotonic()
        kind, options = STORES[mode]
        self._start = int(os.environ["KVSTORE_START"])
        self.store = store = kv.create(kind, bigarray_bound=BOUND, **options)
        self._directory, self._mode, self._phases = directory, mode, phases
        self._made = 0
        self._own = 0  # pushes of this process
        self._file = (directory / f"rounds-{store.rank}-{self._start}").open("w", buffering=1)
        self._file.write(json.dumps(began) + "\n")
        self._state = os.open(directory / f"state-{store.rank}", os.O_WRONLY | os.O_CREAT)
        self._note("coming")
        self._rows = mode.startswith("rows")
        store.set_optimizer("sgd", learning_rate=1.0)
        store.attach("progress", self, shared=True)
        if self._rows:
            self._ids = np.arange(WORKERS * 20)
            self._out = torch.zeros(len(self._ids), 4)
            mine = self._ids[self._ids % WORKERS == store.rank]
            self._gradient: Any = kv.RowSparse(mine, np.full((len(mine), 4), GRADIENT, np.float32))
            store.init("w", kv.Table(shape=(len(self._ids), 4)))
        else:
            self._out = torch.zeros(SIZE)
            self._gradient = (torch.arange(SIZE) // BLOCK % WORKERS == store.rank).float() * GRADIENT
            store.init("w", self._out)
        self._before: torch.Tensor | None = None
        store.barrier()

    def state_dict(self) -> dict[str, int]:
        return {"made": self._made}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._made = state["made"]

    def run(self) -> None:
        stop = self._directory / "stop"
        while not (stop.exists() and self._made >= int(stop.read_text())):
            began = time.monotonic()
            if self._own:
                self._note("round")
            if self._rows:
                self.store.pushpull("w", self._gradient, self._out, row_ids=self._ids)
            else:
                self.store.pushpull("w", self._gradient, self._out)
            self._made += 1
            self._own += 1
            self._file.write(json.dumps([self._made, began, time.monotonic(), self._look()]) + "\n")
            self._between()
        self._note("over")
        self.store.join()  # with a quorum they may have made different numbers of rounds
        self.store.barrier()
        if self._rows:
            self.store.row_sparse_pull("w", self._out, row_ids=self._ids)
        else:
            self.store.pull("w", self._out)
        counts = [[float(each.min()) / GRADIENT, float(each.max()) / GRADIENT] for each in self._parts(-self._out)]
        print(f"exact: {json.dumps(counts)}", flush=True)
        self.store.close()

    def _note(self, phase: str) -> None:
        os.pwrite(self._state, f"{self._start:6d} {self._made:10d} {phase:10s}".encode(), 0)

    def _parts(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Return what is each worker's of ``value``."""
        shaped = value.reshape(-1, WORKERS, BLOCK if value.dim() == 1 else value.shape[1])
        return [shaped[:, rank] for rank in range(WORKERS)]

    def _look(self) -> list[int] | None:
        """Return of each worker whether all, some, or none (2, 1, 0) of its push is in the round; None if unknown."""
        before, self._before = self._before, self._out.clone()
        if before is None or self._mode == "drop":  # there an answer may be of a later round
            return None
        levels = []
        for rank, part in enumerate(self._parts((before - self._out).round())):
            values = set(torch.unique(part).tolist())
            if self._mode in ("sync", "rows"):
                if not values <= {0.0, *(GRADIENT * WORKERS / many for many in range(1, WORKERS + 1))}:
                    raise Wrong(f"round {self._made} changed the part of worker {rank} by {values}")
            elif rank == self.store.rank and values != {GRADIENT}:
                raise Wrong(f"own push {self._own} changed {values}")
            levels.append(0 if values == {0.0} else 1 if 0.0 in values else 2)
        return levels if self._mode in ("sync", "rows") else None  # else others have their own order

    def _between(self) -> None:
        """Do one of the things that are not rounds, all workers the same."""
        if not self._phases or self._made % 4 == 0:
            return
        phase = ("barrier", "init", "join")[self._made % 4 - 1]
        self._note(phase)
        if phase == "barrier":
            self.store.barrier()
        elif phase == "init":
            self.store.init(f"new {self._made}", torch.zeros(5))
        else:
            self.store.join()


@dataclass
class Log:
    """What one process of a worker has written: when it began, and its rounds: number, begin, end, who is in it."""

    rank: int
    began: float
    rounds: list[tuple[int, float, float, list[int] | None]]

    @classmethod
    def read(cls, path: Path) -> Log:
        lines = path.read_text().splitlines()
        return cls(int(path.name.split("-")[1]), json.loads(lines[0]), [tuple(json.loads(x)) for x in lines[1:]])


@dataclass
class Result:
    """What became of a run: what is wrong, empty if nothing is; seconds; the output."""

    wrong: str = ""
    output: str = ""
    kills: list[float] = field(default_factory=list)  # how long the others stood still at each kill
    returns: list[float] = field(default_factory=list)  # likewise while a worker was let in
    usual: list[float] = field(default_factory=list)  # between the ends of two rounds of one worker
    coming: list[float] = field(default_factory=list)  # from the begin of a process to its first push that counts


def carry_out(seed: int, kind: str, mode: str, phases: bool = False, kills: int = KILLED) -> Result:
    """Kill workers one after another, which are started again at once; in the end all must be in."""
    plan = replace(Plan.of(seed, kind), faults=(), mode="sync", workers=WORKERS)
    dice = random.Random(f"returning {seed} {kind} {mode} {phases}")
    work = partial(_work, mode, phases)
    with running(plan, work, least=1, returning=True) as processes:
        trouble, when = _kill(processes, dice, kills)
        states = [_state(processes, rank) for rank in range(WORKERS)]
        stop = processes.directory / "stop"
        stop.with_suffix(".new").write_text(f"{max(made for _, made, _ in states) + 4 * FEW}")
        stop.with_suffix(".new").rename(stop)
        left = processes.wait(1.0 if trouble else END_S)
        if not trouble and left:
            trouble = f"never ended: {left}, {[_state(processes, rank) for rank in range(WORKERS)]}"
        return _judge(processes, trouble, when, mode)


def _state(processes: Processes, rank: int) -> tuple[int, int, str]:
    """Return of a worker's latest process the start, how many rounds it has made, and what it does."""
    path = processes.directory / f"state-{rank}"
    words = (path.read_text() if path.exists() else "").split()
    start = processes.starts[f"worker {rank}"]
    return (start, int(words[1]), words[2]) if len(words) > 2 and int(words[0]) == start else (start, 0, "starting")


def _kill(processes: Processes, dice: random.Random, kills: int) -> tuple[str, list[tuple[float, int]]]:
    """Kill workers; return what went wrong, and when who was killed."""
    when: list[tuple[float, int]] = []

    def inside() -> list[int]:
        return [rank for rank in range(WORKERS) if _state(processes, rank)[2] not in ("starting", "coming")]

    def until(condition: Any) -> bool:
        deadline = time.monotonic() + START_S
        while not condition():
            if time.monotonic() > deadline or len(processes.alive) < WORKERS + 1:
                return False
            time.sleep(0.0005)
        return True

    for number in range(kills):
        # Every second time all are in before the next is killed; else some may be coming.
        wanted = WORKERS if number % 2 == 0 else 2
        if not until(lambda wanted=wanted: len(inside()) >= wanted):
            return f"not in: {[_state(processes, rank) for rank in range(WORKERS)]}", when
        least = {rank: _state(processes, rank)[1] + FEW for rank in inside()}
        if not until(lambda least=least: all(_state(processes, rank)[1] >= made for rank, made in least.items())):
            return f"no round was made: {[_state(processes, rank) for rank in range(WORKERS)]}", when
        coming = [rank for rank in range(WORKERS) if rank not in inside()]
        victim = dice.choice(coming if coming and dice.random() < 0.5 else inside())
        time.sleep(dice.expovariate(200.0))
        start = processes.starts[f"worker {victim}"]
        when.append((time.monotonic(), victim))
        processes.send(f"worker {victim}", signal.SIGKILL)
        if not until(lambda victim=victim, start=start: processes.starts[f"worker {victim}"] > start):
            return f"worker {victim} was not started again", when
    if not until(lambda: len(inside()) == WORKERS):
        return f"not in: {[_state(processes, rank) for rank in range(WORKERS)]}", when
    return "", when


def _judge(processes: Processes, trouble: str, when: list[tuple[float, int]], mode: str) -> Result:
    result = Result(trouble, processes.output)
    paths = sorted(processes.directory.glob("rounds-*-*"), key=lambda path: [*map(int, path.name.split("-")[1:])])
    logs = [Log.read(path) for path in paths if path.read_text()]
    if "Wrong:" in result.output:
        result.wrong = result.output[result.output.index("Wrong:") :].splitlines()[0]
    elif not trouble:
        codes = {name: code for name, code in processes.codes.items() if code}
        said = [line.partition("exact: ")[2] for line in result.output.splitlines() if "exact: " in line]
        result.wrong = f"exit codes {codes}, {len(said)} ended well" if codes or len(said) != WORKERS else ""
        if not result.wrong:
            result.wrong = _miscounted(logs, [rank for _, rank in when], mode, [json.loads(text) for text in said])
    if not result.wrong:
        _measure(result, logs, when)
    return result


def _miscounted(logs: list[Log], killed: list[int], mode: str, totals: list[Any]) -> str:
    """Each push that was acknowledged counts once; the last one of a process that was killed at most once."""
    if mode in ("sync", "rows"):
        known: dict[int, list[int]] = {}
        for log in logs:
            for number, _, _, levels in log.rounds:
                if levels is not None and known.setdefault(number, levels) != levels:
                    return f"round {number}: {known[number]}, and {levels} for worker {log.rank}"
        for rank in range(WORKERS):
            made = {number for log in logs if log.rank == rank for number, *_ in log.rounds}
            perhaps = {log.rounds[-1][0] + 1 for log in logs if log.rank == rank and log.rounds}
            for number, levels in known.items():
                if number in made and levels[rank] < 2:
                    return f"round {number} lacks acknowledged values of worker {rank}: {levels}"
                if number not in made and levels[rank] and number not in perhaps:
                    return f"round {number} has values of worker {rank}, which was not in: {levels}"
    elif mode != "drop":
        for rank in range(WORKERS):
            made = sum(len(log.rounds) for log in logs if log.rank == rank)
            for least, most in (total[rank] for total in totals):
                if not made <= least <= most <= made + killed.count(rank):
                    return (
                        f"pushes of worker {rank} count {least} to {most} times: {made} and {killed.count(rank)} kills"
                    )
    return ""


def _measure(result: Result, logs: list[Log], when: list[tuple[float, int]]) -> None:
    for at, victim in when:
        others = [
            log for log in logs if log.rank != victim and log.rounds and log.rounds[0][2] < at < log.rounds[-1][1]
        ]
        result.kills.append(max(next(end for _, began, end, _ in log.rounds if began > at) - at for log in others))
    for log in logs:
        ends = [end for _, _, end, _ in log.rounds]
        result.usual += [late - early for early, late in pairwise(ends)]
    late = [log for log in logs if log.began > min(at for at, _ in when) and log.rounds]
    for log in late:
        _, began, end, _ = log.rounds[0]
        result.coming.append(end - log.began)
        gaps = [0.0]
        for other in logs:
            if other is not log:
                ends = [each[2] for each in other.rounds]
                gaps += [second - first for first, second in pairwise(ends) if second > began and first < end]
        result.returns.append(max(gaps))


def _work(mode: str, phases: bool, directory: Path) -> None:
    torch.set_num_threads(1)
    Returning(directory, mode, phases).run()
