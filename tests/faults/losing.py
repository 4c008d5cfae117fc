"""Workers that are killed while the job goes on without them, and how long the others stand still.

``python -m faults.losing 0-9`` makes runs with these seeds. All pushes are counted: in stores with rounds integers say
who is in each sum, in others each worker has elements of its own. With ``--return``, they are started again and come
back; see ``faults.returning``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import time
from array import array
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kvstore as kv
from faults import returning
from faults.plan import KINDS, Plan
from faults.processes import running
from faults.runs import spread
from faults.training import BOUND, Wrong

START_S, END_S = 60.0, 60.0
WORKERS, KILLED = 6, 5  # of each run
FEW = 5  # rounds between two kills
SIZE = 30_000  # elements, on both servers
STORES: dict[str, tuple[str, dict[str, Any]]] = {
    "sync": ("dist_sync", {}),
    "async": ("dist_async", {}),
    "ssp": ("dist_ssp", {"staleness": 3}),
    "drop": ("dist_sync", {"quorum": 2, "late": "drop"}),
    "rows-async": ("dist_async", {}),
}
PHASES = ("round", "barrier", "init", "join", "publish", "")  # in which somebody is killed; "" at any moment


class Losing:
    """One worker: it pushes until the file ``stop`` says that it is enough.

    Args:
        directory: of the run. It is told there in what it is, which rounds it has made, and who was in them.
        mode: one of ``STORES``.
        phases: whether there are barriers, new keys, ``join`` and versions for readers between rounds.
    """

    def __init__(self, directory: Path, mode: str, phases: bool) -> None:
        kind, options = STORES[mode]
        self.store = store = kv.create(kind, bigarray_bound=BOUND, **options)
        self._directory, self._mode, self._phases = directory, mode, phases
        self._state = os.open(directory / f"state-{store.rank}", os.O_WRONLY | os.O_CREAT)
        self._times = array("d")
        self._rounds = mode in ("sync", "drop")
        self._whole: list[list[list[int]]] = []  # by round: who is in each part of the sum
        self._made = 0
        if self._rounds:
            self._out = torch.zeros(SIZE, dtype=torch.int64)
            self._gradient: Any = torch.full((SIZE,), 4**store.rank)
        else:
            store.set_optimizer("sgd", learning_rate=1.0)
            self._out = torch.zeros(SIZE)
            self._gradient = (torch.arange(SIZE) % WORKERS == store.rank).float()
        if mode == "rows-async":
            self._ids = np.arange(WORKERS * 20)
            self._out = torch.zeros(len(self._ids), 4)
            mine = self._ids[self._ids % WORKERS == store.rank]
            self._gradient = kv.RowSparse(mine, np.ones((len(mine), 4), np.float32))
            store.init("w", kv.Table(shape=(len(self._ids), 4)))
        else:
            store.init("w", self._out)
        store.barrier()

    def run(self) -> None:
        stop = self._directory / "stop"
        while not (stop.exists() and self._made >= int(stop.read_text())):
            self._note("round")
            began = time.monotonic()
            self._round()
            self._made += 1
            self._times.extend((began, time.monotonic()))
            self._check()
            self._between()
        self._note("over")
        self.store.barrier()
        self._read()
        (self._directory / f"times-{self.store.rank}").write_bytes(self._times.tobytes())
        (self._directory / f"sums-{self.store.rank}").write_text(json.dumps(self._whole))
        counts = [] if self._rounds else self._counts()
        print(f"exact after {self._made} rounds: {json.dumps(counts)}", flush=True)
        self.store.close()

    def _note(self, phase: str) -> None:
        os.pwrite(self._state, f"{self._made:10d} {phase:10s}".encode(), 0)

    def _round(self) -> None:
        if self._mode == "rows-async":
            self.store.pushpull("w", self._gradient, self._out, row_ids=self._ids)
        else:
            self.store.pushpull("w", self._gradient, self._out)

    def _read(self) -> None:
        if self._mode == "rows-async":
            self.store.row_sparse_pull("w", self._out, row_ids=self._ids)
        else:
            self.store.pull("w", self._out)

    def _between(self) -> None:
        """Do one of the things that are not rounds, all workers the same."""
        if not self._phases:
            return
        phase = PHASES[1 + self._made % 4]
        self._note(phase)
        if phase == "barrier":
            self.store.barrier()
        elif phase == "init":
            self.store.init(f"new {self._made}", torch.zeros(5, dtype=torch.int64 if self._rounds else torch.float32))
        elif phase == "join":
            self.store.join()
        elif self._mode == "sync":
            self.store.publish("w")

    def _check(self) -> None:
        if not self._rounds:
            own = self._counts()[self.store.rank]
            if own != (self._made, self._made):
                raise Wrong(f"own pushes count {own} times after {self._made} rounds")
            return
        found = []
        for value in torch.unique(self._out).tolist():
            digits = [value >> (2 * rank) & 3 for rank in range(WORKERS)]
            if max(digits) > 1 or value >= 4**WORKERS or not (digits[self.store.rank] or self._mode == "drop"):
                raise Wrong(f"after round {self._made}: {digits}")
            found.append([rank for rank in range(WORKERS) if digits[rank]])
        self._whole.append(found)

    def _counts(self) -> list[tuple[float, float]]:
        """Return how often each worker's pushes count: at least, and at most. One that died may count once more."""
        flat = -(self._out[:, 0] if self._out.dim() > 1 else self._out)
        return [(float(flat[rank::WORKERS].min()), float(flat[rank::WORKERS].max())) for rank in range(WORKERS)]


@dataclass
class Result:
    """What became of a run: what is wrong, empty if nothing is; the seconds that others stood still; the output."""

    wrong: str
    still_s: list[float]
    output: str


def carry_out(seed: int, kind: str, mode: str, phases: bool = False, kills: int = KILLED) -> Result:
    """Kill workers one after another; the last one must end well."""
    plan = replace(Plan.of(seed, kind), faults=(), mode="sync", workers=WORKERS)
    dice = random.Random(f"losing {seed} {kind} {mode} {phases}")
    with running(plan, partial(_work, mode, phases), least=1) as processes:
        directory = processes.directory
        living, when, made = list(range(WORKERS)), [], {}

        def state(rank: int) -> tuple[int, str]:
            path = directory / f"state-{rank}"
            words = (path.read_text() if path.exists() else "").split()
            return (int(words[0]), words[1]) if len(words) > 1 else (0, "")

        def until(condition: Any, seconds: float = START_S) -> bool:
            deadline = time.monotonic() + seconds
            while not condition():
                if time.monotonic() > deadline or not processes.alive:
                    return False
                processes.reap()
                time.sleep(0.0002)
            return True

        trouble = ""
        for _ in range(kills):
            least = min(state(rank)[0] for rank in living) + FEW
            if not until(lambda least=least: all(state(rank)[0] >= least for rank in living)):
                trouble = f"no round was made: {[(rank, *state(rank)) for rank in living]}"
                break
            victim = dice.choice(living)
            phase = dice.choice(PHASES) if phases else ""
            until(lambda victim=victim, phase=phase: not phase or state(victim)[1] == phase, 2.0)
            if not phase:
                time.sleep(dice.expovariate(200.0))
            processes.send(f"worker {victim}", signal.SIGKILL)
            when.append(time.monotonic())
            living.remove(victim)
            made[victim] = state(victim)[0]
        (directory / "stop.new").write_text(f"{max(state(rank)[0] for rank in living) + 4 * FEW}")
        (directory / "stop.new").rename(directory / "stop")
        left = processes.wait(5.0 if trouble else END_S)
        return _judge(processes, trouble, left, living, made, when, mode)


def _judge(
    processes: Any, trouble: str, left: list[str], living: list[int], made: dict[int, int], when: list[float], mode: str
) -> Result:
    output, directory = processes.output, processes.directory
    said = re.findall(r"\[worker-(\d+)\] exact after (\d+) rounds: (.*)", output)
    ended = {int(rank): int(number) for rank, number, _ in said}
    result = Result(trouble, [], output)
    codes = {name: code for name, code in processes.codes.items() if name not in {f"worker {rank}" for rank in made}}
    if "Wrong:" in output:
        result.wrong = re.findall(r"Wrong: .*", output)[0]
    elif not trouble and (left or len(ended) != len(living) or any(codes.values())):
        result.wrong = f"left: {left}, {len(ended)} have ended, exit codes: {codes}"
    if result.wrong:
        return result
    for *_, counts in said:
        for rank, (least, most) in enumerate(json.loads(counts)):
            first, last = (ended[rank], ended[rank]) if rank in ended else (made[rank], made[rank] + 1)
            if not first <= least <= most <= last:
                result.wrong = f"pushes of worker {rank} count {least} to {most} times instead of {first} to {last}"
    sums = [json.loads((directory / f"sums-{rank}").read_text()) for rank in living]
    if mode == "sync":
        last = [WORKERS] * WORKERS
        for number, parts in enumerate(sums[0], 1):
            if any(other[number - 1] != parts for other in sums[1:] if len(other) >= number):
                result.wrong = f"workers have other sums than others in round {number}"
            for rank in range(WORKERS):
                level = 2 if all(rank in part for part in parts) else int(any(rank in part for part in parts))
                if level > last[rank] or (level < 2 and (rank in living or number <= made[rank])):
                    result.wrong = f"worker {rank} is in {parts} of round {number}"
                last[rank] = level
    for at in when:
        ends = []
        for rank in living:
            times = array("d", (directory / f"times-{rank}").read_bytes())
            ends += [next((end for began, end in zip(times[::2], times[1::2], strict=True) if began > at), at) - at]
        result.still_s.append(max(ends))
    return result


def _work(mode: str, phases: bool, directory: Path) -> None:
    torch.set_num_threads(1)
    Losing(directory, mode, phases).run()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults.losing", description=__doc__)
    parser.add_argument("seeds", help="such as 7, or 0-39")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of links; default %(default)s")
    parser.add_argument("--modes", help="of stores; default: all")
    parser.add_argument("--phases", action="store_true", help="with barriers, new keys, joins and versions in between")
    parser.add_argument("--return", dest="returns", action="store_true", help="who is killed is started again")
    options = parser.parse_args()
    first, _, last = options.seeds.partition("-")
    wrong = 0
    if options.returns:
        return _returns(range(int(first), int(last or first) + 1), options)
    for kind in options.kinds.split(","):
        still: list[float] = []
        for seed in range(int(first), int(last or first) + 1):
            for mode in (options.modes or ",".join(STORES)).split(","):
                result = carry_out(seed, kind, mode, options.phases)
                still += result.still_s
                if result.wrong:
                    wrong += 1
                    print(f"{kind} {mode} {seed}: {result.wrong}\n{result.output[-4000:]}", flush=True)
        if still:
            print(
                f"{kind}: {len(still)} workers killed; the others have made their next round after {spread(still, 3)}",
                flush=True,
            )
    return 1 if wrong else 0


def _returns(seeds: range, options: argparse.Namespace) -> int:
    wrong = 0
    for kind in options.kinds.split(","):
        whole = returning.Result()
        for seed in seeds:
            for mode in (options.modes or ",".join(returning.STORES)).split(","):
                result = returning.carry_out(seed, kind, mode, options.phases)
                for name in ("kills", "returns", "usual", "coming"):
                    getattr(whole, name).extend(getattr(result, name))
                if result.wrong:
                    wrong += 1
                    print(f"{kind} {mode} {seed}: {result.wrong}\n{result.output[-4000:]}", flush=True)
        if whole.kills:
            print(
                f"{kind}: {len(whole.kills)} workers killed, {len(whole.returns)} let in. The others' next round is "
                f"over {spread(whole.kills, 3)} after a kill. Between two rounds are {spread(whole.usual, 3)}, and "
                f"while one is let in at most {spread(whole.returns, 3)}. From its begin to its first push that "
                f"counts a worker takes {spread(whole.coming, 3)}",
                flush=True,
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
