"""Runs by seeds: what happens in each, and what it must lead to. Pure, but for the run itself."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from simulation.exactness import Assigned, Bits, Counting
from simulation.job import HEARTBEAT_LIMIT_S, Outcome, SimulatedJob
from simulation.network import Weather
from simulation.programs import BOUND, Interrupted, Training
from simulation.row_exactness import RowBits, RowCounting, TwinCounting
from simulation.world import Action

from kvstore.errors import KVStoreError
from kvstore.rule import Rule

STANDBYS = ("standby 0", "standby 1")
MEMBERS = ("scheduler", "server 0", "server 1", "worker 0", "worker 1")
WORKERS = ("worker 0", "worker 1", "worker 2")  # of jobs that go on without workers that die
HOSTS: tuple[tuple[tuple[int, ...], ...], ...] = (((0, 1), (2, 3)), ((0, 1, 2),))  # of 4 workers
RULES = {
    "sync": Rule(),
    "async": Rule("async"),
    "ssp": Rule("async", staleness=2),
    "drop": Rule(quorum=1, late="drop"),
    "keep": Rule(quorum=1, late="keep"),
}
MODES = ("sync", "async", "ssp")
RESTARTS = 20
SLOW_S = 40.0  # virtual seconds that a run may take beyond its pauses: several limits of heartbeats
COMPRESSIONS: tuple[dict[str, Any] | None, ...] = (None, None, {"type": "fp16"})


Program: TypeAlias = "Training | Assigned | Counting | Bits | RowCounting | TwinCounting | RowBits"
FAIR = Weather()


@dataclass(frozen=True)
class Plan:
    """One run of 2 workers and 2 servers; or of 4 workers, on hosts with aggregators.

    Attributes:
        seed: of the network and of the workers' calls.
        mode: the store's.
        weather: what links are like.
        compression: of gradients.
        uneven: whether rank 0 pushes less often than rank 1.
        pieces: whether large arrays go in pieces.
        crashes: members, and after which delivery each is killed.
        pause: a member, after which delivery it is stopped, and for how many seconds.
        partings: two members, after which delivery they are parted, and for how many seconds.
        interrupts: after which deliveries an exception comes in the middle of a call of which worker.
        hosts: the ranks of the workers of each host that has an aggregator.
        replicas: 1 if each server has a standby.
        shares: whether standbys are handed what updates have made, now and then.
        start_s: how long a process that is started again takes to run, on average.
        program: what workers do: ``train``, ``assigned``, ``count`` or ``bits``; with tables ``count rows``,
            ``count twins`` or ``row bits``.
        rounds: at most so many, where the program can.
        late: a member that hears the scheduler so many seconds late.
        limit_s: after how many seconds of silence a member is lost.
        workers: how many, where no host has an aggregator.
        least: the job goes on without workers that die as long as so many are left; 0 if it does not.
        reaped: whether the launcher sees at once who has ended, if that is decided here.
        returns: whether workers that die are started again, too.
        moves: servers and standbys, and after which delivery each is to be moved.
        added: after which deliveries one more worker is started.
    """

    seed: int
    mode: str = "sync"
    weather: Weather = FAIR
    compression: dict[str, Any] | None = None
    uneven: bool = False
    pieces: bool = False
    crashes: tuple[tuple[str, int], ...] = ()
    pause: tuple[str, int, float] | None = None
    partings: tuple[tuple[str, str, int, float], ...] = ()
    interrupts: tuple[tuple[int, int], ...] = ()
    hosts: tuple[tuple[int, ...], ...] = ()
    replicas: int = 0
    shares: bool = False
    start_s: float = 0.05
    program: str = "train"
    rounds: int = 100
    late: tuple[str, float] | None = None
    limit_s: float = HEARTBEAT_LIMIT_S
    workers: int = 2
    least: int = 0
    reaped: bool | None = None
    returns: bool = False
    moves: tuple[tuple[str, int], ...] = ()
    added: tuple[int, ...] = ()

    @property
    def members(self) -> tuple[str, ...]:
        members = (*MEMBERS, *STANDBYS) if self.replicas else MEMBERS
        more = [f"worker {rank}" for rank in range(2, self.num_workers)]
        return (*members, *more, *(f"aggregator {number}" for number in range(len(self.hosts))))

    @property
    def hit(self) -> set[str]:
        """To whom something happens."""
        members = {member for member, _ in self.crashes} | {one for parting in self.partings for one in parting[:2]}
        return members if self.pause is None else {*members, self.pause[0]}

    @property
    def num_workers(self) -> int:
        return 4 if self.hosts else self.workers

    @property
    def seats(self) -> int:
        return self.num_workers + len(self.added)

    @classmethod
    def of(cls, seed: int) -> Plan:
        """Return the plan of a seed. Every second one has a crash."""
        dice = random.Random(seed)
        mode = dice.choice(MODES)
        weather = Weather(0.002, dice.choice((0.0, 0.005, 0.03)), dice.choice((0.0, 0.1)))
        at = partial(dice.randrange, 1, 140)
        plan = cls(
            seed,
            mode,
            weather,
            dice.choice(COMPRESSIONS),
            mode == "sync" and dice.random() < 0.3,
            dice.random() < 0.3,
            ((dice.choice(MEMBERS), at()),) if dice.random() < 0.5 else (),
            (dice.choice(MEMBERS), at(), dice.uniform(0.1, 3.0)) if dice.random() < 0.3 else None,
            ((*dice.sample(MEMBERS, 2), at(), dice.uniform(0.1, 3.0)),) if dice.random() < 0.3 else (),
            tuple((at(), dice.randrange(2)) for _ in range(dice.choice((0, 0, 5)))),
        )
        if dice.random() < 0.5:
            return plan
        plan = replace(plan, hosts=dice.choice(HOSTS))
        if plan.crashes:
            plan = replace(plan, crashes=((dice.choice(plan.members), plan.crashes[0][1]),))
        if plan.pause is not None:
            plan = replace(plan, pause=(dice.choice(plan.members), *plan.pause[1:]))
        if plan.partings:
            plan = replace(plan, partings=((*dice.sample(plan.members, 2), *plan.partings[0][2:]),))
        return plan


def carry_out(plan: Plan) -> Outcome:
    return carry_out_in(job_of(plan), plan, _program(plan))


def job_of(plan: Plan) -> SimulatedJob:
    return SimulatedJob(
        plan.seed,
        plan.weather,
        workers=plan.num_workers,
        hosts=plan.hosts,
        rule=RULES[plan.mode],
        bigarray_bound=BOUND,
        piece_bytes=4096 if plan.pieces else 1 << 20,
        replicas=plan.replicas,
        restarts=RESTARTS if plan.replicas or plan.returns else 0,
        start_s=plan.start_s,
        shares=plan.shares,
        reaped=plan.reaped,
        returns=plan.returns,
        heartbeat_s=plan.limit_s / 10,
        heartbeat_timeout_s=plan.limit_s,
        min_workers=plan.least,
        **({"max_workers": plan.seats} if plan.added else {}),
    )


def _program(plan: Plan) -> Program:
    if plan.program == "count":
        return Counting(plan.seed, plan.mode, plan.uneven, plan.rounds)
    if plan.program == "assigned":
        return Assigned(min(plan.rounds, 5))
    if plan.program == "bits":
        return Bits(plan.seed, plan.compression, min(plan.rounds, 3))
    if plan.program == "count rows":
        return RowCounting(plan.seed, plan.mode, plan.uneven, plan.rounds)
    if plan.program == "count twins":
        return TwinCounting(plan.seed, plan.mode, plan.uneven, plan.rounds)
    if plan.program == "row bits":
        return RowBits(plan.seed, min(plan.rounds, 3))
    return Training(plan.seed, plan.mode, plan.compression, plan.uneven, later=bool(plan.replicas))


def carry_out_in(job: SimulatedJob, plan: Plan, training: Any) -> Outcome:
    """Run ``training`` in the job of a plan, and let happen what the plan says."""
    due: defaultdict[int, list[Action]] = defaultdict(list)
    for member, at in plan.crashes:
        due[at].append(partial(job.kill, member))
    for member, at in plan.moves:
        due[at].append(partial(job.launcher.move, member))
    for rank, at in enumerate(plan.added, plan.num_workers):
        due[at].append(partial(job.launcher.start_again, f"worker {rank}"))
    if plan.pause is not None:
        due[plan.pause[1]].append(partial(_pause, job, plan.pause[0], plan.pause[2]))
    for one, other, at, last_s in plan.partings:
        due[at].append(partial(job.network.part, one, other, last_s))
    for at, rank in plan.interrupts:
        due[at].append(partial(_interrupt, job, training, rank))

    if plan.late is not None:
        job.network.late_s["scheduler", plan.late[0]] = plan.late[1]

    def happen() -> None:
        for action in due.pop(job.network.deliveries, ()):
            job.world.after(0.0, action)

    job.network.on_delivery = happen
    return job.run(training)


def _pause(job: SimulatedJob, member: str, last_s: float) -> None:
    process = job.processes[member]
    process.stop()
    job.world.after(last_s, process.resume)


def _interrupt(job: SimulatedJob, training: Program, rank: int) -> None:
    if rank in training.armed:
        job.processes[f"worker {rank}"].tasks[0].interrupt(Interrupted())


def exhaustive(
    plan: Plan,
    members: Iterable[str] = (),
    first: int = 1,
    step: int = 1,
    run: Callable[[Plan], Outcome] = carry_out,
) -> Iterator[Plan]:
    """Yield the plans that kill each member after each message of ``plan``, in which some may die already."""
    last = run(plan).deliveries
    for member in members or plan.members:
        for at in range(first, last + 1, step):
            yield replace(plan, crashes=(*plan.crashes, (member, at)))


def crashes(seed: int, hosts: tuple[tuple[int, ...], ...] = ()) -> Iterator[Plan]:
    """Yield the plans that kill each member after each message of the run with a seed, in two modes."""
    for mode in ("sync", "async"):
        plan = Plan(seed, mode, hosts=hosts)
        yield from exhaustive(plan)


def never_right(outcome: Outcome) -> str:
    """Say what is wrong with a run, whatever was done to it; empty if nothing is."""
    if outcome.hanging:
        return f"these hang: {outcome.hanging}"
    wrong = {rank: error for rank, error in outcome.errors.items() if not isinstance(error, KVStoreError)}
    return f"wrong: {wrong}" if wrong else ""


def verdict(plan: Plan, outcome: Outcome) -> str:
    """Say how a run has ended: ``exact``, ``loud``, or else what is wrong with it."""
    dead = {member for member, _ in plan.crashes}
    if bad := never_right(outcome):
        return bad
    if outcome.refused and not (plan.replicas and (plan.pause or plan.partings)):  # who comes back has been replaced
        return f"{outcome.refused} messages of members were refused"
    unfinished = [  # the job may have failed before a worker was killed that was to be
        rank
        for rank, result in enumerate(outcome.results)
        if result is None and (f"worker {rank}" not in dead or rank in outcome.errors)
    ]
    if sorted(unfinished) != sorted(outcome.errors):
        return f"workers {unfinished} have no result, and these an error: {outcome.errors}"
    if not plan.crashes and not plan.replicas and (unfinished or any(outcome.exit_codes.values())):
        return f"nobody was killed, but {outcome.errors}, and exit codes are {outcome.exit_codes}"
    return "loud" if unfinished else "exact"


def slow_s(plan: Plan) -> float:
    """Return how many virtual seconds are too many for a run."""
    return SLOW_S + (plan.pause[2] if plan.pause else 0.0) + sum(last_s for *_, last_s in plan.partings)


def before_the_job(plan: Plan, outcome: Outcome) -> bool:
    """Whether somebody was killed before all had joined, where any error is right."""
    return outcome.welcomed is None or any(at <= outcome.welcomed for _, at in plan.crashes)


# ---- jobs that go on without workers that die


def drawn(dice: random.Random, plan: Plan, rounds: tuple[int, ...], starts: tuple[float, ...]) -> Plan:
    """Return ``plan`` with the circumstances of a seed."""
    return replace(
        plan,
        weather=Weather(dice.choice((0.002, 0.02)), dice.choice((0.0, 0.005, 0.02)), dice.choice((0.0, 0.1))),
        rounds=dice.choice(rounds),
        replicas=dice.randrange(2),
        shares=dice.random() < 0.5,
        start_s=dice.choice(starts),
        limit_s=dice.choice((5.0, 1.0)),
        reaped=dice.random() < 0.8,
        least=dice.choice((1, 1, 1, 2)),
    )


def with_lost_server(dice: random.Random, plan: Plan, at: Callable[[], int]) -> Plan:
    """Return ``plan``, perhaps with the death of a server, a standby or the scheduler."""
    if plan.replicas and dice.random() < 0.6:
        lost = dice.choice((*MEMBERS[1:3], *STANDBYS, "scheduler")), at()
        # Who is silent for too long is not started again in time.
        return replace(plan, crashes=(*plan.crashes, lost), reaped=True)
    return plan


def with_silence(dice: random.Random, plan: Plan, at: Callable[[], int], chance: float) -> Plan:
    """Return ``plan``, perhaps with a worker that is stopped, and with one that is parted from another member."""
    workers = [f"worker {rank}" for rank in range(plan.num_workers)]
    if dice.random() < chance:
        plan = replace(plan, pause=(dice.choice(workers), at(), plan.limit_s * dice.choice((0.3, 1.6, 3.0))))
    if dice.random() < chance:
        other = dice.choice(("scheduler", "server 0", "server 1"))
        parting = dice.choice(workers), other, at(), plan.limit_s * dice.choice((0.3, 1.6, 3.0))
        plan = replace(plan, partings=(parting,))
    return plan


class SparingRun:
    """One run of a plan; ``verdict`` is ``exact``, ``loud`` where that is right, or else what is wrong with it."""

    def __init__(self, job: SimulatedJob, plan: Plan, program: Any) -> None:
        self._plan = plan
        self.outcome: Outcome = carry_out_in(job, plan, program)
        self.verdict = never_right(self.outcome) or self._judge()

    def _judge(self) -> str:
        raise NotImplementedError

    def _out_of_reach(self) -> set[str]:
        """Return who is given up though it lives."""
        plan = self._plan
        gone = {plan.pause[0]} if plan.pause is not None and plan.pause[2] > 0.7 * plan.limit_s else set()
        for one, other, _, last_s in plan.partings:
            if "scheduler" in (one, other) and last_s > 0.7 * plan.limit_s:
                gone.add(other if one == "scheduler" else one)
        return gone

    def _alike(self, results: list[Any], late_s: float = 0.0) -> str:
        """Say whether ``results`` are alike and came in time, ``late_s`` apart."""
        if any(result != results[0] for result in results):
            return "workers end with other values than others"
        worked_s = self.outcome.worked_s
        return "exact" if worked_s < slow_s(self._plan) + late_s else f"it took {worked_s:.1f} s"

    def _loud(self, failed: dict[int, BaseException], too_few: bool) -> str:
        """Say whether workers may have ``failed``; they may, if the workers that are left are ``too_few``."""
        plan, outcome = self._plan, self.outcome
        if too_few or before_the_job(plan, outcome):
            return "loud"
        texts = " ".join(map(str, failed.values()))
        for rank in range(2):
            lost = [member for member, _ in plan.crashes if member in (f"server {rank}", f"standby {rank}")]
            if (not plan.replicas and lost) or len(lost) > 1:
                return "loud" if f"server {rank}" in texts else f"server {rank} is not named in {texts}"
        return f"the job should have gone on, but {failed}; exit codes are {outcome.exit_codes}"
