"""Jobs in which workers that die are started again: what happens to them, and what must become of that.

Each push of each process has a place of its own in the values, so that these say in the end what has counted, and how
often. What was answered counts once; the rest of a dead process at most once; and each round is of as many as there
are.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from simulation.job import Outcome
from simulation.runs import HOSTS, Plan, SparingRun, drawn, job_of, with_lost_server, with_silence

import kvstore as kv
from kvstore.client import DistStore
from kvstore.errors import JOB_FAILED_EXIT

REST_S = 0.03  # on average, so that a newcomer comes while there is something left to do
JOINS_S = 20.0  # how long one that comes when the scheduler has ended looks for it
LIVES = 5  # of a rank; later ones push what counts nowhere
PUSHES = 8  # of one life
REPEATS = 40  # of all places in the long array, so that both servers have each
BASE = Plan(0, program="return", rounds=7, workers=3, least=1, reaped=True, start_s=0.01, returns=True)


class Progress:
    """Where a worker is in its program: what one that comes back takes over."""

    def __init__(self) -> None:
        self.step, self.joined = 0, False

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "joined": self.joined}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.joined = state["step"], state["joined"]


class Returning:
    """One job's workers.

    Args:
        seed: decides how each pushes.
        rounds: that each makes before the end, or before all ``join`` and make two more, if they are ``uneven``.
        uneven: whether each rank pushes once less often than the next one until then.
        tables: whether there are rows, too.
        barriers: whether there is one after each round.

    Attributes:
        lives: by rank, how often its program has begun.
        made: by rank and life, how many pushes have been answered.
        starts: by name, how often each member was started.
        entered: the ranks and starts that were let in, or began with the job.
        armed: nobody: calls are not interrupted.
        failed: why those among them have ended that failed, by rank.
        rest: lets the time pass that a worker needs before its next push.
    """

    def __init__(self, seed: int, rounds: int, workers: int, uneven: bool, tables: bool, barriers: bool) -> None:
        self.lives: Counter[int] = Counter()
        self.made: Counter[tuple[int, int]] = Counter()
        self.starts: Mapping[str, int] = {}
        self.entered: set[tuple[int, int]] = set()
        self.failed: dict[int, Exception] = {}
        self.armed: set[int] = set()
        self.rest: Callable[[float], None] = lambda _: None
        self.places = workers * LIVES * PUSHES
        self.rounds = rounds + 2 if uneven else rounds
        self._seed, self._last, self._uneven, self._barriers = seed, rounds, uneven, barriers
        self.keys = ["long", "whole", "rows"] if tables else ["long", "whole"]
        self._ids = np.arange(self.places)

    def __call__(self, store: DistStore) -> list[Any]:
        life = self.lives[store.rank]
        self.lives[store.rank] += 1
        start = self.starts[f"worker {store.rank}"]
        try:
            return self._live(store, life, start)
        except Exception as exc:
            if (store.rank, start) in self.entered:
                self.failed[store.rank] = exc
            raise

    def _live(self, store: DistStore, life: int, start: int) -> list[Any]:
        dice = random.Random(f"{self._seed} {store.rank} {life}")
        progress = Progress()
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init(self.keys[:2], self._outs()[:2])
        if len(self.keys) > 2:
            store.init("rows", kv.Table(shape=(self.places, 2)))
        store.attach("progress", progress, shared=True)
        waiting: list[tuple[list[kv.Ticket], int]] = []
        pushed = 0
        short = max(0, store.num_workers - 1 - store.rank) if self._uneven else 0
        while progress.step < self.rounds:
            if self._uneven and not progress.joined and progress.step >= self._last - short:
                self._wait(store, life, waiting)
                store.join()
                progress.step, progress.joined = self._last, True
            self.rest(dice.expovariate(1 / REST_S))
            values, outs = self._values(store.rank, life, pushed), self._outs()
            way = dice.randrange(3)
            if way == 0 and len(self.keys) == 2:
                tickets = [store.push(key, value) for key, value in zip(self.keys, values, strict=True)]
            else:
                tickets = [self._pushpull(store, values, outs, wait=way == 1)]
            self.entered.add((store.rank, start))
            progress.step += 1
            pushed += 1
            waiting.append((tickets, pushed))
            if way != 2:
                self._wait(store, life, waiting)
            if self._barriers:
                store.barrier()
        self._wait(store, life, waiting)
        store.barrier()
        outs = self._outs()
        store.pull(self.keys[:2], outs[:2])
        if len(self.keys) > 2:
            store.row_sparse_pull("rows", outs[2], row_ids=self._ids)
        return [out.tolist() for out in outs]

    def _wait(self, store: DistStore, life: int, waiting: list[tuple[list[kv.Ticket], int]]) -> None:
        for tickets, number in waiting:
            for ticket in tickets:
                ticket.wait()
            # Not before: a worker may die between the answers for two arrays.
            self.made[store.rank, life] = number
        waiting.clear()

    def _values(self, rank: int, life: int, pushed: int) -> list[Any]:
        own = torch.zeros(self.places)
        if life < LIVES:
            own[self.place(rank, life, pushed)] = 1.0
        values: list[Any] = [own.repeat(REPEATS), own]
        if len(self.keys) > 2:
            values.append(kv.RowSparse(self._ids, own[:, None].repeat(1, 2).numpy()))
        return values

    def place(self, rank: int, life: int, pushed: int) -> int:
        return (rank * LIVES + life) * PUSHES + pushed

    def _outs(self) -> list[torch.Tensor]:
        outs = [torch.zeros(self.places * REPEATS), torch.zeros(self.places)]
        return [*outs, torch.zeros(self.places, 2)] if len(self.keys) > 2 else outs

    def _pushpull(self, store: DistStore, values: list[Any], outs: list[torch.Tensor], wait: bool) -> kv.Ticket:
        if len(self.keys) == 2:
            return store.pushpull(self.keys, values, outs, wait=wait)
        return store.pushpull(self.keys, values, outs, row_ids=[None, None, self._ids], wait=wait)

    def parts(self, result: list[Any]) -> set[tuple[bool, tuple[float, ...]]]:
        """Return all that the places hold anywhere, each with whether one server has all of it."""
        found: set[tuple[bool, tuple[float, ...]]] = set()
        for values in result:
            table = -torch.tensor(values)
            rows = Counter(map(tuple, (table.T if table.ndim == 2 else table.reshape(-1, self.places)).tolist()))
            # Where one server's part ends in the middle of a row, that one is of both. A table's rows are of both.
            found.update((table.ndim < 2, row) for row, times in rows.items() if times > 1 or len(rows) == 1)
        return found


class Run(SparingRun):
    """One run of a plan."""

    def __init__(self, plan: Plan) -> None:
        tables = plan.program == "return rows"
        barriers = bool(plan.seed % 2) and not plan.uneven  # nobody inside ``join`` comes to one
        self.program = Returning(plan.seed, plan.rounds, plan.seats, plan.uneven, tables, barriers)
        job = job_of(plan)
        self.program.starts = job.starts
        self.program.rest = lambda rest_s: job.world.current.wait(rest_s) if job.world.current is not None else None
        super().__init__(job, plan, self.program)

    def _judge(self) -> str:
        outcome, plan = self.outcome, self._plan
        results = [result for result in outcome.results if result is not None]
        failed = {rank: error for rank, error in outcome.errors.items() if not self._came_in_vain(rank)}
        away = self._out_of_reach()
        failed |= {rank: error for rank, error in self.program.failed.items() if f"worker {rank}" not in away}
        too_few = plan.least > 1 and outcome.exit_codes["scheduler"] == JOB_FAILED_EXIT
        # Where all that were in are lost, nobody can let others in.
        too_few = too_few or sum(member.startswith("worker") for member in plan.hit) >= plan.num_workers
        if failed:
            return self._loud(failed, too_few)
        if not results:
            return "loud" if too_few else "nobody has a result"
        late_s = JOINS_S * sum("joining the job" in str(error) for error in outcome.errors.values())
        alike = self._alike(results, late_s)
        if plan.mode in ("drop", "keep") or alike != "exact":
            return alike
        counted = (self._count(part, of_one_server) for of_one_server, part in self.program.parts(results[0]))
        return next(filter(None, counted), alike)

    def _came_in_vain(self, rank: int) -> bool:
        """Return whether the last process of ``rank`` was to fail: it was out of reach, or the others had ended."""
        outcome = self.outcome
        done = any(result is not None for result in outcome.results)
        start = outcome.starts[f"worker {rank}"]
        came = (start > 1 or rank >= self._plan.num_workers) and (rank, start) not in self.program.entered
        return f"worker {rank}" in self._out_of_reach() or (done and came and outcome.exit_codes["scheduler"] == 0)

    def _count(self, part: tuple[float, ...], of_one_server: bool) -> str:
        """Say what is wrong with what has counted."""
        plan, program, workers = self._plan, self.program, self._plan.num_workers
        factors = [1.0]
        if plan.mode == "sync":
            factors = [a / b for a in range(1, workers + 1) for b in range(1, (a if a < workers else plan.seats) + 1)]
        for rank in range(plan.seats):
            for life in range(LIVES):
                made = program.made[rank, life]
                own = [part[program.place(rank, life, pushed)] for pushed in range(PUSHES)]
                if any(not value for value in own[:made]):
                    return f"life {life} of worker {rank} was answered {made} pushes, of which have counted {own}"
                if any(value and min(abs(value - factor) for factor in factors) > 1e-4 for value in own):
                    return f"life {life} of worker {rank}: of its pushes have counted {own}"
        # A round may be of fewer workers on one server than on the other, if one of them dies in the middle of a step.
        if (
            plan.mode == "sync"
            and of_one_server
            and not plan.uneven
            and abs(sum(part) - program.rounds * workers) > 1e-3
        ):
            return f"all have counted {sum(part)} times in {program.rounds} rounds of {workers} workers"
        return ""


def outcome_of(plan: Plan) -> Outcome:
    return Run(plan).outcome


def returning(seed: int) -> Plan:
    """Return the plan of a seed: workers die, several times; servers and the scheduler die, too, and links fail."""
    dice = random.Random(f"returning {seed}")
    mode = dice.choice(("sync", "sync", "sync", "async", "ssp", "drop", "keep"))
    plan = replace(BASE, seed=seed, mode=mode, program=dice.choice(("return", "return", "return rows")))
    plan = drawn(dice, plan, (4, 6), (0.005, 0.03))
    plan = replace(plan, uneven=dice.random() < 0.2)
    at = partial(dice.randrange, 20, 600 if plan.replicas else 300)
    workers = [f"worker {rank}" for rank in range(plan.num_workers)]
    crashes = [(dice.choice(workers), at()) for _ in range(dice.choice((1, 1, 2, 3)))]
    if dice.random() < 0.3:
        crashes.append((crashes[0][0], crashes[0][1] + dice.randrange(20, 150)))
    plan = with_lost_server(dice, replace(plan, crashes=tuple(crashes)), at)
    plan = with_silence(dice, plan, at, 0.2)
    if plan.mode == "sync" and plan.program == "return" and not plan.replicas and dice.random() < 0.2:
        plan = replace(plan, hosts=dice.choice(HOSTS))
        if dice.random() < 0.7:
            plan = replace(plan, crashes=(*plan.crashes, (f"aggregator {dice.randrange(len(plan.hosts))}", at())))
    return plan
