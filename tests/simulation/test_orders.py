"""Processes that are killed, stopped and continued in many orders, in virtual time, under launch.py's supervision."""

from __future__ import annotations

import pytest
from faults.orders import SEATS, order
from simulation.network import Weather
from simulation.orders import Ordered
from simulation.runs import HOSTS


def require(seed: int, ends: tuple[str, ...], hosts: tuple[tuple[int, ...], ...] = ()) -> None:
    chosen = order(seed, ends=ends)
    run = Ordered(chosen, seed, Weather(), hosts)
    assert run.verdict == "", f"{chosen}: {run.verdict}\n{run.trace()}"


@pytest.mark.parametrize("end", ["", *SEATS, "both", "scheduler"])
def test_only_what_has_ended_a_job_is_named_and_who_comes_back_never_ends_it(end: str) -> None:
    for seed in range(2):
        require(seed, (end,))


@pytest.mark.parametrize("end", ["worker", "aggregator"])
def test_nor_does_it_if_a_worker_or_an_aggregator_ends_the_job_later(end: str) -> None:
    for seed in range(2):
        require(seed, (end,), HOSTS[0])


@pytest.mark.faults
def test_all_orders_by_seeds() -> None:
    for seed in range(300):
        require(seed, ("", *SEATS, "both", "scheduler"))
        require(seed, ("", "worker", "aggregator"), HOSTS[0])
