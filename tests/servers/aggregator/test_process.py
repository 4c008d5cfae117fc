"""Whole jobs in virtual time with aggregators: the same values as without, and loud when one dies."""

from __future__ import annotations

import pytest
import torch
from simulation.job import SimulatedJob
from simulation.network import Weather
from simulation.programs import add
from simulation.runs import HOSTS, Plan, carry_out, verdict

from kvstore.client import DistStore
from kvstore.errors import JOB_FAILED_EXIT


@pytest.mark.parametrize("mode", ["sync", "async", "ssp"])
@pytest.mark.parametrize("hosts", HOSTS)
def test_a_job_with_aggregators_is_exact(mode: str, hosts: tuple[tuple[int, ...], ...]) -> None:
    plan = Plan(1, mode, hosts=hosts)
    assert verdict(plan, carry_out(plan)) == "exact"


@pytest.mark.parametrize("plan", [Plan(2, compression={"type": "fp16"}), Plan(3, uneven=True), Plan(4, pieces=True)])
def test_compression_join_and_pieces(plan: Plan) -> None:
    for hosts in HOSTS:
        with_hosts = Plan(**{**vars(plan), "hosts": hosts})
        assert verdict(with_hosts, carry_out(with_hosts)) == "exact"


def test_an_aggregator_that_dies_ends_the_job_by_name() -> None:
    outcome = carry_out(Plan(5, hosts=HOSTS[0], crashes=(("aggregator 1", 200),)))
    assert outcome.errors
    assert all("aggregator 1" in str(error) for error in outcome.errors.values())
    assert outcome.exit_codes["aggregator 0"] == JOB_FAILED_EXIT


def test_sums_are_in_a_fixed_order() -> None:
    results = [SimulatedJob(seed, workers=4, hosts=HOSTS[0]).run(add).results for seed in range(3)]
    assert len({tuple(map(tuple, result)) for result in results}) == 1
    assert len({tuple(values) for values in results[0]}) == 1


def test_a_host_sends_one_gradient_and_is_sent_one_value_however_many_workers_it_has() -> None:
    size, rounds = 20_000, 5

    def train(store: DistStore) -> None:
        out = torch.zeros(size)
        store.init("w", out)
        for _ in range(rounds):
            store.pushpull("w", torch.ones(size), out)
            assert out.tolist() == [4.0] * size

    def crossed(hosts: tuple[tuple[int, ...], ...]) -> int:
        """Bytes between hosts if each server is on one with two workers."""
        job = SimulatedJob(0, Weather(cut=0.0, repeat=0.0), workers=4, hosts=hosts, bigarray_bound=1000)
        outcome = job.run(train)
        assert not outcome.errors
        members = [
            {"server 0", "worker 0", "worker 1", "aggregator 0"},
            {"server 1", "worker 2", "worker 3", "aggregator 1"},
        ]
        return sum(
            nbytes
            for (source, target), nbytes in job.network.traffic.items()
            for here in members
            if source in here and target not in here and target != "scheduler"
        )

    once = 2 * 2 * (4 * size // 2) * rounds  # each way, of two hosts, half of the array
    assert crossed(HOSTS[0]) < 1.2 * once
    assert crossed(()) > 1.9 * once
