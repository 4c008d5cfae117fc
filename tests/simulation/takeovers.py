"""Jobs whose servers have standbys: what happens to them, by seeds, and what must become of that.

One process of a rank may be lost at any moment, and the scheduler: then the run must be exact, bit by bit. Two losses
of a rank before it has healed, and the loss of a worker, end the job by name.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial

from simulation.job import Outcome
from simulation.network import Weather
from simulation.runs import HOSTS, MEMBERS, MODES, STANDBYS, Plan, before_the_job, carry_out, slow_s, verdict

SEATS = (*MEMBERS[1:3], *STANDBYS)  # that may be lost
CODED = ({"type": "2bit", "threshold": 0.5, "pull": "fp16"}, {"type": "int8", "pull": "int8"}, None)
BITS = ("bits", "row bits")  # programs that return all bytes


def replicated(seed: int) -> Plan:
    dice = random.Random(f"replicated {seed}")
    program = dice.choice(("train", "count", "count", "bits"))
    modes = {"train": MODES, "count": (*MODES, "drop", "keep"), "bits": ("sync",)}[program]
    plan = Plan(
        seed,
        dice.choice(modes),
        Weather(0.002, dice.choice((0.0, 0.005, 0.03)), dice.choice((0.0, 0.1))),
        dice.choice(CODED) if program == "bits" else None,
        pieces=dice.random() < 0.3,
        replicas=1,
        start_s=dice.choice((0.01, 0.05, 0.5)),
        program=program,
        limit_s=dice.choice((5.0, 1.0)),
    )
    if plan.mode in MODES and dice.random() < 0.3:
        plan = replace(plan, hosts=dice.choice(HOSTS))
    if plan.mode == "sync" and program != "bits" and dice.random() < 0.3:
        plan = replace(plan, uneven=True)
    if plan.limit_s < 2.0:  # who is silent for so long is lost
        plan = replace(plan, start_s=min(plan.start_s, 0.05))
    if dice.random() < 0.3:  # so slow that silence is noticed before the end
        plan = replace(plan, weather=replace(plan.weather, delay_s=0.02))
    at = partial(dice.randrange, 1, 800 if plan.hosts else 400)
    crashes = tuple((dice.choice((*SEATS, "scheduler")), at()) for _ in range(dice.choice((0, 1, 1, 2))))
    if dice.random() < 0.1:
        crashes += ((dice.choice(plan.members), at()),)
    plan = replace(plan, crashes=crashes)
    if dice.random() < 0.3:
        plan = replace(plan, pause=(dice.choice(SEATS), at(), plan.limit_s * dice.choice((0.1, 0.6, 1.6, 3.0))))
    if dice.random() < 0.3:
        parted = dice.sample(plan.members, 2)
        plan = replace(plan, partings=((*parted, at(), plan.limit_s * dice.choice((0.1, 0.6, 1.6))),))
    plan = replace(plan, shares=random.Random(f"shares {seed}").random() < 0.7)
    if program == "train":
        return replace(plan, interrupts=tuple((at(), dice.randrange(2)) for _ in range(dice.choice((0, 0, 5)))))
    return plan


def moved(seed: int) -> Plan:
    """Return a run in which servers and standbys are moved, one after the other, perhaps with a death among them."""
    dice = random.Random(f"moved {seed}")
    plan = replicated(seed)
    moves = tuple((dice.choice(SEATS), dice.randrange(1, 600)) for _ in range(dice.choice((1, 2, 6))))
    return replace(plan, moves=moves, crashes=plan.crashes[:1], partings=())


def with_tables(plan: Plan) -> Plan:
    """Return ``plan`` with programs that have tables."""
    return replace(plan, program="row bits" if plan.program == "bits" else "count rows", compression=None)


def short(seed: int, hosts: tuple[tuple[int, ...], ...] = ()) -> tuple[Plan, ...]:
    """Return runs of three rounds, with rounds and without: short enough for a death after each message.

    The last one has no optimizer.
    """
    count = Plan(seed, hosts=hosts, replicas=1, shares=True, program="count", rounds=3)
    bits, assigned = replace(count, program="bits", rounds=1), replace(count, program="assigned")
    return count, replace(count, mode="async"), bits, assigned


def every_move(plan: Plan, members: tuple[str, ...] = SEATS, step: int = 1) -> Iterator[Plan]:
    """Yield the plans that move each member after each message of ``plan``."""
    last = carry_out(plan).deliveries
    for member in members:
        for at in range(1, last + 1, step):
            yield replace(plan, moves=((member, at),))


def judge(plan: Plan, outcome: Outcome) -> str:
    """Say how a run has ended: ``exact``, ``loud`` where that is right, or else what is wrong with it."""
    said = verdict(plan, outcome)
    if said == "exact":
        if outcome.worked_s > slow_s(plan):
            return f"it took {outcome.worked_s:.1f} s"
        pairs = zip(outcome.results, _undisturbed(plan) if plan.program in BITS else outcome.results, strict=True)
        if any(
            made is not None and made != wanted for made, wanted in pairs
        ):  # a worker may have been killed at its end
            return "other bits than in the undisturbed run"
        return said
    if said != "loud":
        return said
    if before_the_job(plan, outcome):
        return said
    reasons = _reasons(plan)
    if not reasons:
        return f"the job should have gone on, but {outcome.errors}; exit codes are {outcome.exit_codes}"
    texts = " ".join(map(str, outcome.errors.values()))
    if not any(name in texts for name in reasons):
        return f"none of {sorted(reasons)} is named in {texts}"
    return said


def _reasons(plan: Plan) -> set[str]:
    """Return who may be named as what the job has failed for; nobody if it must not fail."""
    lost = Counter(member for member, _ in plan.crashes)
    if plan.pause is not None and plan.pause[2] > 0.8 * plan.limit_s:
        lost[plan.pause[0]] += 1
    for one, other, _, last_s in plan.partings:
        if last_s > 0.8 * plan.limit_s:
            lost.update(_given_up({one, other}))
    reasons = {member for member in lost if member.startswith(("worker", "aggregator"))}
    if reasons and any("scheduler" in pair for pair in plan.partings):
        reasons.add("scheduler")  # which is what the one that was cut off says
    lost.update({member for member, _ in plan.moves} if lost else ())  # a rank that is being moved has one process
    for rank in range(2):
        if lost[f"server {rank}"] + lost[f"standby {rank}"] > 1:
            reasons.add(f"server {rank}")
    return reasons


def _given_up(parted: set[str]) -> list[str]:
    """Return whom the job gives up when these two members have not reached each other for too long."""
    if "scheduler" in parted:
        return list(parted - {"scheduler"})
    for rank in range(2):
        if parted == {f"server {rank}", f"standby {rank}"}:
            return [f"standby {rank}"]  # the server gets another
    return []


def _undisturbed(plan: Plan) -> list[object]:
    """Return the results of a run of the same programs without faults, and without replicas."""
    return _results(plan.seed, CODED.index(plan.compression), plan.pieces, plan.hosts, plan.rounds, plan.program)


@lru_cache(maxsize=64)
def _results(
    seed: int, coded: int, pieces: bool, hosts: tuple[tuple[int, ...], ...], rounds: int, program: str
) -> list[object]:
    return carry_out(
        Plan(seed, compression=CODED[coded], pieces=pieces, hosts=hosts, program=program, rounds=rounds)
    ).results
