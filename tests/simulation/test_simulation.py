"""Whole jobs in virtual time: whatever happens to links and processes, values are right or the job says so."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from simulation.job import SimulatedJob
from simulation.network import Weather
from simulation.programs import add
from simulation.runs import MEMBERS, Plan, carry_out, crashes, verdict
from simulation.transport import SimulatedTransport

from kvstore.client import DistStore
from kvstore.errors import DeadlineExceeded
from kvstore.member.links import Links
from kvstore.member.mutual_waits import LOOK_S
from kvstore.rule import Rule
from servers.requests.repeats import Ledger, Verdict
from servers.shard import Shard
from servers.store.bucket import Bucket
from servers.store.rounds import Rounds

# ---- whole jobs in virtual time: whatever happens to links and processes, values are right or the job says so


ROUGH = Weather(delay_s=0.02, cut=0.02, repeat=0.1)


def require(plan: Plan, *wanted: str) -> None:
    """Carry out a plan, whose verdict must be one of those."""
    outcome = carry_out(plan)
    said = verdict(plan, outcome)
    assert said in wanted, f"{plan}: {said}\n{outcome.trace()}"


def rough(seed: int, mode: str) -> Plan:
    """A plan on links that are late, cut and repeat themselves, with exceptions in the middle of calls."""
    return Plan(seed, mode, ROUGH, interrupts=tuple((at, at % 2) for at in range(35, 210, 7)))


@pytest.mark.parametrize("mode", ["sync", "async", "ssp"])
def test_rough_links_and_exceptions_change_no_value(mode: str) -> None:
    require(rough(0, mode), "exact")


def test_runs_by_seeds_are_exact_or_loud() -> None:
    for seed in range(6):
        require(Plan.of(seed), "exact", "loud")


def test_tables_that_are_pushed_together_are_exact_or_loud() -> None:
    for seed in range(3):
        require(replace(Plan.of(seed), program="count twins", compression=None), "exact", "loud")


@pytest.mark.release
def test_many_runs_by_seeds_are_exact_or_loud() -> None:
    for seed in range(6, 50):
        require(Plan.of(seed), "exact", "loud")


@pytest.mark.long
@pytest.mark.parametrize("first", [0, pytest.param(50, marks=pytest.mark.release)])
def test_a_crash_of_any_member_after_any_message_is_loud(first: int) -> None:
    """Every 101st of all; ``python -m simulation 0 --crashes`` makes all of them."""
    plans = list(islice(crashes(0), first, None, 101))
    assert {member for plan in plans for member, _ in plan.crashes} == set(MEMBERS)
    for plan in plans:
        require(plan, "exact", "loud")


@pytest.mark.parametrize("member", MEMBERS)
def test_a_member_that_is_stopped_for_less_than_the_limit_costs_nothing(member: str) -> None:
    require(Plan(3, "sync", pause=(member, 60, 4.0)), "exact")


def test_a_job_ends_well_although_the_last_words_are_lost() -> None:
    last = carry_out(Plan(5)).deliveries
    for at in range(last - 5, last):
        require(Plan(5, partings=(("server 0", "scheduler", at, 3.0),)), "exact")


def test_sums_are_in_the_order_of_ranks_whatever_overtakes_what() -> None:
    results = []
    for seed in range(2):
        outcome = SimulatedJob(seed, ROUGH, workers=3).run(add)
        assert not outcome.errors
        results += outcome.results
    assert all(result == results[0] for result in results)


def test_a_seed_says_all_of_what_happens() -> None:
    one, other = carry_out(rough(4, "sync")), carry_out(rough(4, "sync"))
    assert (one.took_s, one.deliveries, one.cuts) == (other.took_s, other.deliveries, other.cuts)
    assert one.cuts > 0
    assert carry_out(rough(5, "sync")).took_s != one.took_s


# ---- what is broken is found


MUTATIONS: dict[str, tuple[type, str, Callable[[Any], Any]]] = {
    "repeats are applied again": (
        Ledger,
        "admit",
        lambda admit: lambda self, request: Verdict.NEW if (said := admit(self, request)) is Verdict.REPEAT else said,
    ),
    "nothing is sent again over a new link": (
        Links,
        "_take",
        lambda take: lambda self, route, frames: take(self, route, frames) if frames else self._introduce(route),
    ),
    "answers of earlier rounds are not kept": (Shard, "_keeps", lambda _: lambda self, store: False),
    "values change while messages refer to them": (Bucket, "_read", lambda _: property(lambda self: False)),
    "an interrupted call goes on reading the caller's arrays": (
        Links,
        "give_up",
        lambda _: lambda self, operation: None,
    ),
    "what has not left is not copied": (SimulatedTransport, "detach", lambda _: lambda self: None),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, mutate = MUTATIONS[name]
    monkeypatch.setattr(owner, attribute, mutate(vars(owner)[attribute]))
    plans = (rough(seed, mode) for seed in range(8) for mode in ("sync", "async"))
    assert any(verdict(plan, carry_out(plan)) != "exact" for plan in plans)


def test_sums_in_the_order_of_arrival_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    really = Rounds.complete

    def complete(self: Rounds[Any]) -> list[Any] | None:
        items = really(self)
        return items and [items[-1], *items[:-1]]

    right = SimulatedJob(0, ROUGH, workers=3).run(add).results[0]
    monkeypatch.setattr(Rounds, "complete", complete)
    assert SimulatedJob(0, ROUGH, workers=3).run(add).results[0] != right


# ---- whole jobs in virtual time whose workers wait for each other: proven soon, and never where somebody goes on


CALM = Weather(delay_s=0.001)
STORMY = Weather(delay_s=0.05, cut=0.01, repeat=0.1)
TIMEOUT_S, PATIENCE_S, LIMIT_S = 60.0, 1800.0, 1000.0
Call = Callable[[DistStore], Any]


def value() -> torch.Tensor:
    return torch.zeros(3)


def begin(store: DistStore) -> None:
    store.init(["a", "b", "c"], [value()] * 3)


def both(key: str) -> Call:
    return lambda store: store.pushpull(key, value(), out=value())


def barrier(store: DistStore) -> None:
    store.barrier()


def behind(store: DistStore) -> None:
    """A push that nobody waits for, then a wait."""
    store.push("a", value())
    store.barrier()


def optimizer(store: DistStore) -> None:
    store.set_optimizer("sgd", learning_rate=0.1)


def more(store: DistStore) -> None:
    store.init("d", value())


def job_of(calls: Sequence[Call], weather: Weather = CALM, seed: int = 0, **options: Any) -> Any:
    def program(store: DistStore) -> None:
        begin(store)
        calls[store.rank](store)

    job = SimulatedJob(seed, weather, workers=len(calls), timeout_s=TIMEOUT_S, patience_s=PATIENCE_S, **options)
    return job.run(program, 30.0)


WAITS = {
    "other keys": [both("a"), both("b")],
    "a round and a barrier": [both("a"), barrier],
    "a first value and a round": [both("a"), more],
    "an optimizer and a barrier": [barrier, optimizer],
    "an optimizer and a round": [both("b"), optimizer],
    "a push behind, a barrier and a round": [both("b"), behind],
    "three in a circle": [both("a"), both("b"), both("c")],
    "two, and a third behind them": [both("a"), both("b"), barrier],
}


@pytest.mark.parametrize("calls", WAITS.values(), ids=WAITS)
@pytest.mark.parametrize("weather", [CALM, STORMY], ids=["calm", "rough"])
def test_workers_that_wait_for_each_other_are_told_within_ten_seconds(calls: list[Call], weather: Weather) -> None:
    outcome = job_of(calls, weather)
    assert set(outcome.errors) == set(range(len(calls)))
    assert outcome.worked_s < LOOK_S + 5.0
    proven = [str(error) for error in outcome.errors.values() if isinstance(error, DeadlineExceeded)]
    assert proven
    for text in proven:
        assert "never ends: workers 0" in text
        assert "wait for each other: worker 0 is in " in text
        assert "worker 1 is in " in text


def test_workers_of_a_host_with_an_aggregator_are_told_too() -> None:
    outcome = job_of([both("a"), both("b"), both("a"), both("a")], hosts=[[0, 1], [2, 3]])
    assert outcome.worked_s < LOOK_S + 5.0
    assert any(isinstance(error, DeadlineExceeded) for error in outcome.errors.values())


def test_workers_that_are_ahead_of_each_other_are_told() -> None:
    """With a staleness, each waits until the other has pushed a key that it does not push."""

    def ahead(key: str) -> Call:
        return lambda store: [optimizer(store), *(store.pushpull(key, value(), out=value()) for _ in range(3))]

    outcome = job_of([ahead("a"), ahead("b")], rule=Rule("async", staleness=1))
    assert outcome.worked_s < LOOK_S + 5.0
    assert any("wait for each other" in str(error) for error in outcome.errors.values())


def test_a_worker_that_computes_may_end_what_two_others_wait_for() -> None:
    """With a quorum of two, the third worker's push completes the rounds in which the others wait for each other."""
    job = SimulatedJob(0, CALM, 3, rule=Rule(quorum=2), timeout_s=TIMEOUT_S, patience_s=PATIENCE_S)

    def program(store: DistStore) -> None:
        begin(store)
        if store.rank == 2:
            compute(job, 50.0)
        for key in ("a", "b") if store.rank != 1 else ("b", "a"):
            both(key)(store)

    outcome = job.run(program, LIMIT_S)
    assert not outcome.errors
    assert outcome.worked_s > 50.0


@pytest.mark.parametrize("mode", ["sync", "ssp"])
def test_workers_that_take_long_in_turn_are_never_told(mode: str) -> None:
    """Who waits for whom changes all the time, and what has been said of it comes late."""
    rule = Rule() if mode == "sync" else Rule("async", staleness=1)
    for seed in range(2):
        job = SimulatedJob(seed, STORMY, 3, rule=rule, timeout_s=TIMEOUT_S, patience_s=PATIENCE_S)

        def program(store: DistStore, job: SimulatedJob = job, seed: int = seed) -> None:
            begin(store)
            optimizer(store)
            draw, alike = random.Random(f"{seed} {store.rank}"), random.Random(seed)
            for _ in range(8):
                compute(job, draw.choice([0.0, 0.0, draw.uniform(0.0, 25.0), LOOK_S, 2 * LOOK_S]))
                key = alike.choice("abc")
                if alike.random() < 0.3:
                    store.push(key, value())
                    compute(job, draw.uniform(0.0, 7.0))
                both(key)(store)
                if alike.random() < 0.2:
                    store.barrier()

        outcome = job.run(program, LIMIT_S)
        assert not outcome.errors
        assert not outcome.hanging


def compute(job: SimulatedJob, seconds: float) -> None:
    task = job.world.current
    assert task is not None
    task.wait(seconds)
