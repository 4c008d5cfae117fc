"""Whole jobs in virtual time: whatever happens to links and processes, values are right or the job says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from simulation.job import SimulatedJob
from simulation.network import Weather
from simulation.programs import add
from simulation.runs import MEMBERS, Plan, carry_out, crashes, verdict
from simulation.transport import SimulatedTransport

from kvstore.member.links import Links
from servers.requests.repeats import Ledger, Verdict
from servers.shard import Shard
from servers.store.bucket import Bucket
from servers.store.rounds import Rounds

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
    for seed in range(6):
        require(replace(Plan.of(seed), program="count twins", compression=None), "exact", "loud")


@pytest.mark.release
def test_many_runs_by_seeds_are_exact_or_loud() -> None:
    for seed in range(6, 50):
        require(Plan.of(seed), "exact", "loud")


@pytest.mark.long
def test_a_crash_of_any_member_after_any_message_is_loud() -> None:
    """Every seventeenth of all; ``python -m simulation 0 --crashes`` makes all of them."""
    plans = list(islice(crashes(0), 0, None, 17))
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
