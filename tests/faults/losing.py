"""Workers that are killed while the job goes on, and how long the others stand still; they may be started again.

``python -m faults.losing 0-9`` makes runs with these seeds; with ``--return`` who is killed comes back, and is let in.
Servers update all stores here, as they must where workers come back. Each worker has elements of its own, so that the
weights tell after each round who is in it. What each process has been acknowledged is in a file of its own, which
outlives it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kvstore as kv
from faults.plan import KINDS, Plan
from faults.processes import Processes, running
from faults.runs import spread
from faults.training import BOUND, Wrong

START_S, END_S = 60.0, 60.0
WORKERS, KILLED = 4, 5  # of each run; where nobody comes back, one stays
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


PHASES = ("round", "barrier", "init", "join", "publish", "")  # in which somebody is killed; "" at any moment


class Worker:
    """One worker, of which each process pushes until the file ``stop`` says that it is enough.

    Args:
        directory: of the run.
        mode: one of ``STORES``.
        phases: whether there are barriers, new keys, ``join`` and versions for readers between rounds.
        returns: whether it is started again when it is killed.
    """

    def __init__(self, directory: Path, mode: str, phases: bool, returns: bool) -> None:
        began = time.monotonic()
        kind, options = STORES[mode]
        self._start = int(os.environ["KVSTORE_START"])
        self.store = store = kv.create(kind, bigarray_bound=BOUND, **options)
        self._directory, self._mode, self._phases = directory, mode, phases
        self._publishes = mode == "sync" and not returns
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
        if not self._phases:
            return
        phase = PHASES[1 + self._made % 4]
        self._note(phase)
        # A worker that is late with a quorum skips rounds, and its next one may need those that wait here for it.
        if self._mode == "drop" and phase in ("barrier", "init"):
            self.store.join()
        if phase == "barrier":
            self.store.barrier()
        elif phase == "init":
            self.store.init(f"new {self._made}", torch.zeros(5))
        elif phase == "join":
            self.store.join()
        elif self._publishes:
            self.store.publish("w")


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


def carry_out(
    seed: int, kind: str, mode: str, phases: bool = False, kills: int = KILLED, returns: bool = False
) -> Result:
    """Kill workers one after another. If they return, they are started again at once, and in the end all must be in."""
    plan = replace(Plan.of(seed, kind), faults=(), mode="sync", workers=WORKERS)
    dice = random.Random(f"losing {seed} {kind} {mode} {phases} {returns}")
    work = partial(_work, mode, phases, returns)
    with running(plan, work, least=1, returning=returns) as processes:
        run = _Run(processes, dice, phases, returns)
        trouble = run.kill(kills if returns else min(kills, WORKERS - 1))
        stop = processes.directory / "stop"
        stop.with_suffix(".new").write_text(f"{max(run.made(rank) for rank in run.living) + 4 * FEW}")
        stop.with_suffix(".new").rename(stop)
        left = processes.wait(1.0 if trouble else END_S)
        if not trouble and left:
            trouble = f"never ended: {left}, {run.states}"
        return _judge(processes, trouble, run.killed, run.living, mode)


class _Run:
    def __init__(self, processes: Processes, dice: random.Random, phases: bool, returns: bool) -> None:
        self.living = list(range(WORKERS))  # those that are to end well
        self.killed: list[tuple[float, int]] = []  # when, and who
        self._processes, self._dice = processes, dice
        self._phases, self._returns = phases, returns

    @property
    def states(self) -> list[tuple[int, int, str]]:
        return [self._state(rank) for rank in range(WORKERS)]

    def made(self, rank: int) -> int:
        return self._state(rank)[1]

    def kill(self, kills: int) -> str:
        """Kill so many workers; return what went wrong."""
        for number in range(kills):
            # Every second time all are in before the next is killed; else some may be coming.
            wanted = 2 if self._returns and number % 2 else len(self.living)
            if not self._until(lambda wanted=wanted: len(self._inside()) >= wanted):
                return f"not in: {self.states}"
            least = {rank: self.made(rank) + FEW for rank in self._inside()}
            if not self._until(lambda least=least: all(self.made(rank) >= made for rank, made in least.items())):
                return f"no round was made: {self.states}"
            victim, start = self._strike()
            if not self._returns:
                self.living.remove(victim)
            elif not self._until(lambda victim=victim, start=start: self._start(victim) > start):
                return f"worker {victim} was not started again"
        return "" if self._until(lambda: len(self._inside()) == len(self.living)) else f"not in: {self.states}"

    def _strike(self) -> tuple[int, int]:
        """Kill somebody; return the rank, and which of its processes it was."""
        inside = self._inside()
        coming = [rank for rank in self.living if rank not in inside]
        victim = self._dice.choice(coming if coming and self._dice.random() < 0.5 else inside)
        phase = self._dice.choice(PHASES) if self._phases and not self._returns else ""
        if phase:
            self._until(lambda: self._state(victim)[2] == phase, 2.0)
        else:
            time.sleep(self._dice.expovariate(200.0))
        start = self._start(victim)
        self.killed.append((time.monotonic(), victim))
        self._processes.send(f"worker {victim}", signal.SIGKILL)
        return victim, start

    def _start(self, rank: int) -> int:
        return self._processes.starts[f"worker {rank}"]

    def _state(self, rank: int) -> tuple[int, int, str]:
        """Return of a worker's latest process the start, how many rounds it has made, and what it does."""
        path = self._processes.directory / f"state-{rank}"
        words = (path.read_text() if path.exists() else "").split()
        start = self._start(rank)
        return (start, int(words[1]), words[2]) if len(words) > 2 and int(words[0]) == start else (start, 0, "starting")

    def _inside(self) -> list[int]:
        return [rank for rank in self.living if self._state(rank)[2] not in ("starting", "coming")]

    def _until(self, condition: Any, seconds: float = START_S) -> bool:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or len(self._processes.alive) <= len(self.living):
                return False
            time.sleep(0.0005)
        return True


def _judge(processes: Processes, trouble: str, when: list[tuple[float, int]], living: list[int], mode: str) -> Result:
    result = Result(trouble, processes.output)
    paths = sorted(processes.directory.glob("rounds-*-*"), key=lambda path: [*map(int, path.name.split("-")[1:])])
    logs = [Log.read(path) for path in paths if path.read_text()]
    if "Wrong:" in result.output:
        result.wrong = result.output[result.output.index("Wrong:") :].splitlines()[0]
    elif not trouble:
        dead = {f"worker {rank}" for rank in range(WORKERS) if rank not in living}
        codes = {name: code for name, code in processes.codes.items() if code and name not in dead}
        said = [line.partition("exact: ")[2] for line in result.output.splitlines() if "exact: " in line]
        result.wrong = f"exit codes {codes}, {len(said)} ended well" if codes or len(said) != len(living) else ""
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


def _work(mode: str, phases: bool, returns: bool, directory: Path) -> None:
    torch.set_num_threads(1)
    Worker(directory, mode, phases, returns).run()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults.losing", description=__doc__)
    parser.add_argument("seeds", help="such as 7, or 0-39")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of links; default %(default)s")
    parser.add_argument("--modes", default=",".join(STORES), help="of stores; default %(default)s")
    parser.add_argument("--phases", action="store_true", help="with barriers, new keys, joins and versions in between")
    parser.add_argument("--return", dest="returns", action="store_true", help="who is killed is started again")
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    wrong = 0
    for kind in options.kinds.split(","):
        whole = Result()
        for seed in range(int(first), int(last or first) + 1):
            for mode in options.modes.split(","):
                result = carry_out(seed, kind, mode, options.phases, returns=options.returns)
                for name in ("kills", "returns", "usual", "coming"):
                    getattr(whole, name).extend(getattr(result, name))
                if result.wrong:
                    wrong += 1
                    print(f"{kind} {mode} {seed}: {result.wrong}\n{result.output[-4000:]}", flush=True)
        if whole.kills:
            print(
                f"{kind}: {len(whole.kills)} workers killed, {len(whole.returns)} let in. The others' next round is "
                f"over {spread(whole.kills, 3)} after a kill. Between two rounds are {spread(whole.usual, 3)}",
                flush=True,
            )
        if whole.returns:
            print(
                f"{kind}: while one is let in there are at most {spread(whole.returns, 3)} between two rounds. From "
                f"its begin to its first push that counts a worker takes {spread(whole.coming, 3)}",
                flush=True,
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
