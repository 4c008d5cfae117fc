"""Jobs that go on without workers that die: what happens to them, and what must become of that.

Whoever lives ends, soon and with the values of all others. Its contributions are in every round, and those of a dead
worker in the first ones: at least as many as it has been answered, each once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from simulation.job import Outcome
from simulation.network import Weather
from simulation.runs import HOSTS, MEMBERS, STANDBYS, Plan, carry_out_in, job_of, never_right
from simulation.survivors import Surviving, SurvivingClocks, SurvivingRows

SLOW_S = 40.0  # virtual seconds that a run may take: several limits of heartbeats
BASE = Plan(0, program="survive", rounds=3, workers=3, least=1, reaped=True)


class Run:
    """One run of a plan; ``verdict`` is ``exact``, ``loud`` where that is right, or else what is wrong with it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._program = program(plan)
        job = job_of(plan)
        self.outcome: Outcome = carry_out_in(job, plan, self._program)
        self.verdict = self._judge()

    def _judge(self) -> str:
        outcome, plan = self.outcome, self._plan
        if bad := never_right(outcome):
            return bad
        dead = {int(member.split()[1]) for member in self._killed() if member.startswith("worker")}
        living = [rank for rank in range(plan.num_workers) if rank not in dead]
        failed = {rank: error for rank, error in outcome.errors.items() if rank in living}
        said = self._rounds(living, dead)
        if said:
            return said
        if failed:
            return self._loud(failed, dead)
        results = [outcome.results[rank] for rank in living]
        if None in results:
            return f"a worker has no result: {results}"
        if any(result != results[0] for result in results):
            return "workers end with other values than others"
        slow = SLOW_S + (plan.pause[2] if plan.pause else 0.0) + sum(last_s for *_, last_s in plan.partings)
        return "exact" if outcome.worked_s < slow else f"it took {outcome.worked_s:.1f} s"

    def _killed(self) -> set[str]:
        """Return who is killed in this run, or given up since it is out of reach for too long."""
        plan = self._plan
        gone = {member for member, at in plan.crashes if at <= self.outcome.deliveries}
        if plan.pause is not None and plan.pause[2] > 0.7 * plan.limit_s:
            gone.add(plan.pause[0])
        for one, other, _, last_s in plan.partings:
            if "scheduler" in (one, other) and last_s > 0.7 * plan.limit_s:
                gone.add(other if one == "scheduler" else one)
        return gone

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

    def _loud(self, failed: dict[int, BaseException], dead: set[int]) -> str:
        plan, outcome = self._plan, self.outcome
        if outcome.welcomed is None or any(at <= outcome.welcomed for _, at in plan.crashes):
            return "loud"  # before the job began
        texts = " ".join(map(str, failed.values()))
        if plan.num_workers - len(dead) < plan.least and any(f"worker {rank}" in texts for rank in dead):
            return "loud"
        for rank in range(2):
            lost = [member for member, _ in plan.crashes if member in (f"server {rank}", f"standby {rank}")]
            if (not plan.replicas and lost) or len(lost) > 1:
                return "loud" if f"server {rank}" in texts else f"server {rank} is not named in {texts}"
        return f"the job should have gone on, but {failed}; exit codes are {outcome.exit_codes}"


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
    hit = {member for member, _ in plan.crashes} | {member for parting in plan.partings for member in parting[:2]}
    hit.update([] if plan.pause is None else [plan.pause[0]])
    return bool(plan.replicas) or any(member.startswith("aggregator") for member in hit)


def short(seed: int = 0) -> tuple[Plan, ...]:
    """Return runs of three workers and three rounds, short enough for a death after each message."""
    base = replace(BASE, seed=seed)
    return base, replace(base, seed=seed + 1), replace(base, seed=seed + 2, uneven=True)


def lossy(seed: int) -> Plan:
    """Return the plan of a seed: workers die, or are out of reach and come back; servers and the scheduler die, too."""
    dice = random.Random(f"lossy {seed}")
    plan = replace(
        BASE,
        seed=seed,
        mode=dice.choice(("sync", "sync", "async", "ssp", "drop", "keep")),
        weather=Weather(dice.choice((0.002, 0.02)), dice.choice((0.0, 0.005, 0.02)), dice.choice((0.0, 0.1))),
        rounds=dice.choice((3, 5)),
        replicas=dice.randrange(2),
        shares=dice.random() < 0.5,
        start_s=dice.choice((0.01, 0.05)),
        limit_s=dice.choice((5.0, 1.0)),
        reaped=dice.random() < 0.8,
        least=dice.choice((1, 1, 1, 2)),
    )
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
    crashes = [(member, at()) for member in dice.sample(workers, dice.choice((0, 1, 1, 2)))]
    if plan.replicas and dice.random() < 0.6:
        crashes.append((dice.choice((*MEMBERS[1:3], *STANDBYS, "scheduler")), at()))
        plan = replace(plan, reaped=True)  # who is silent for too long is not started again in time
    if plan.hosts and dice.random() < 0.7:
        crashes.append((f"aggregator {dice.randrange(len(plan.hosts))}", at()))
    plan = replace(plan, crashes=tuple(crashes))
    if dice.random() < 0.4:
        plan = replace(plan, pause=(dice.choice(workers), at(), plan.limit_s * dice.choice((0.3, 1.6, 3.0))))
    if dice.random() < 0.4:
        other = dice.choice(("scheduler", "server 0", "server 1"))
        plan = replace(
            plan, partings=((dice.choice(workers), other, at(), plan.limit_s * dice.choice((0.3, 1.6, 3.0))),)
        )
    return plan


def exhaustive(plan: Plan, members: tuple[str, ...] = (), first: int = 1, step: int = 1) -> Iterator[Plan]:
    """Yield the plans that kill each worker after each message of ``plan``."""
    last = Run(plan).outcome.deliveries
    for member in members or tuple(f"worker {rank}" for rank in range(plan.num_workers)):
        for at in range(first, last + 1, step):
            yield replace(plan, crashes=((member, at),))
