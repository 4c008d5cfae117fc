"""Whole jobs in virtual time whose workers wait for each other: proven soon, and never where somebody goes on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from simulation.job import SimulatedJob
from simulation.network import Weather

from kvstore.client import DistStore
from kvstore.errors import DeadlineExceeded
from kvstore.member.mutual_waits import LOOK_S
from kvstore.rule import Rule

CALM = Weather(delay_s=0.001)
ROUGH = Weather(delay_s=0.05, cut=0.01, repeat=0.1)
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
@pytest.mark.parametrize("weather", [CALM, ROUGH], ids=["calm", "rough"])
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
        job = SimulatedJob(seed, ROUGH, 3, rule=rule, timeout_s=TIMEOUT_S, patience_s=PATIENCE_S)

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
