"""Jobs that go on without workers that die: what happens to them, and what must become of that.

Whoever lives ends, soon and with the values of all others. Its contributions are in every round, and those of a dead
worker in the first ones: at least as many as it has been answered, each once.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

from simulation.job import Outcome
from simulation.runs import HOSTS, Plan, SparingRun, drawn, job_of, with_lost_server, with_silence
from simulation.survivors import Surviving, SurvivingClocks, SurvivingRows

BASE = Plan(0, program="survive", rounds=3, workers=3, least=1, reaped=True)


class Run(SparingRun):
    """One run of a plan."""

    def __init__(self, plan: Plan) -> None:
        self._program = program(plan)
        super().__init__(job_of(plan), plan, self._program)

    def _judge(self) -> str:
        outcome, plan = self.outcome, self._plan
        killed = {member for member, at in plan.crashes if at <= outcome.deliveries} | self._out_of_reach()
        dead = {int(member.split()[1]) for member in killed if member.startswith("worker")}
        living = [rank for rank in range(plan.num_workers) if rank not in dead]
        failed = {rank: error for rank, error in outcome.errors.items() if rank in living}
        said = self._rounds(living, dead)
        if said:
            return said
        if failed:
            texts = " ".join(map(str, failed.values()))
            named = any(f"worker {rank}" in texts for rank in dead)
            return self._loud(failed, too_few=named and plan.num_workers - len(dead) < plan.least)
        results = [outcome.results[rank] for rank in living]
        return f"a worker has no result: {results}" if None in results else self._alike(results)

    def _rounds(self, living: list[int], dead: set[int]) -> str:
        """Say what is wrong with the rounds of which workers have been answered."""
        if isinstance(self._program, SurvivingClocks):
            return self._clocks(self._program, living, dead)
        seen = {rank: {each.number: each.members for each in rounds} for rank, rounds in self._program.seen.items()}
        if self._plan.mode not in ("sync", "assigned"):
            return ""
        exactly = not later(self._plan)
        for rank in living:
            for number, members in seen.get(rank, {}).items():
                for other in living:
                    if exactly and number in seen.get(other, {}) and seen[other][number] != members:
                        return f"round {number}: workers {rank} and {other} have other values"
                for key, parts in members.items():
                    for other in living:
                        if exactly and number in seen.get(other, {}) and any(other not in part for part in parts):
                            return f"round {number} of {key!r}: worker {other} is not in {parts}"
        for victim in dead:
            for rank in living:
                last: dict[str, int] = {}
                for number, members in sorted(seen.get(rank, {}).items()):
                    if self._plan.uneven and self._program.pauses(victim, number, self._plan.num_workers):
                        continue
                    for key, parts in members.items():
                        level = sum(victim in part for part in parts) * 2 // len(parts)
                        # An aggregator brings a dead worker's pushes one by one: one may be too late, and the next not.
                        if level > last.get(key, 2) and not self._plan.hosts:
                            return f"round {number} of {key!r}: worker {victim} is in it again"
                        if exactly and number in seen.get(victim, {}) and level < 2:
                            return f"round {number} of {key!r}: the answered push of worker {victim} does not count"
                        last[key] = level
        return ""

    def _clocks(self, program: SurvivingClocks, living: list[int], dead: set[int]) -> str:
        """Say what is wrong with the pushes that count at the end, if there are no rounds."""
        workers = self._plan.num_workers
        for rank in set(living) & program.seen.keys():
            for key, digits in program.seen[rank]:
                for other in range(workers):
                    own = digits[other::workers]
                    made = program.made.get(other, 0)
                    if sorted(own, reverse=True) != own or not all(own[:made]) or any(digit > 1 for digit in own):
                        return f"{key!r}: pushes of worker {other} counted {own}, and {made} were answered"
        return ""


def outcome_of(plan: Plan) -> Outcome:
    return Run(plan).outcome


def program(plan: Plan) -> Surviving | SurvivingClocks:
    if plan.mode in ("async", "ssp"):
        return SurvivingClocks(plan.seed, plan.mode, plan.uneven, plan.rounds)
    barriers = bool(plan.seed % 2)
    if plan.program == "survive rows":
        return SurvivingRows(plan.seed, plan.rounds, plan.uneven, barriers)
    partial_ = plan.mode in ("drop", "keep")
    return Surviving(plan.seed, plan.rounds, plan.uneven, partial_, barriers, later=later(plan))


def later(plan: Plan) -> bool:
    """Whether an answer may have the values of a later round: it was repeated to a process that did not give it."""
    return bool(plan.replicas) or any(member.startswith("aggregator") for member in plan.hit)


def short(seed: int = 0) -> tuple[Plan, ...]:
    """Return runs of three workers and three rounds, short enough for a death after each message."""
    base = replace(BASE, seed=seed)
    return base, replace(base, seed=seed + 1), replace(base, seed=seed + 2, uneven=True)


def lossy(seed: int) -> Plan:
    """Return the plan of a seed: workers die, or are out of reach and come back; servers and the scheduler die, too."""
    dice = random.Random(f"lossy {seed}")
    plan = replace(BASE, seed=seed, mode=dice.choice(("sync", "sync", "async", "ssp", "drop", "keep")))
    plan = drawn(dice, plan, (3, 5), (0.01, 0.05))
    if plan.mode in ("async", "ssp"):
        plan = replace(plan, rounds=3)
    if plan.mode == "sync" and dice.random() < 0.3:
        plan = replace(plan, program="survive rows")
    if plan.mode in ("async", "ssp") and dice.random() < 0.3:
        plan = replace(plan, uneven=True)
    if plan.program == "survive" and dice.random() < 0.3:
        plan = replace(plan, hosts=dice.choice(HOSTS), rounds=3)
    at = partial(dice.randrange, 20, 500 if plan.hosts or plan.replicas else 250)
    workers = [f"worker {rank}" for rank in range(plan.num_workers)]
    crashes = tuple((member, at()) for member in dice.sample(workers, dice.choice((0, 1, 1, 2))))
    plan = with_lost_server(dice, replace(plan, crashes=crashes), at)
    if plan.hosts and dice.random() < 0.7:
        plan = replace(plan, crashes=(*plan.crashes, (f"aggregator {dice.randrange(len(plan.hosts))}", at())))
    return with_silence(dice, plan, at, 0.4)
