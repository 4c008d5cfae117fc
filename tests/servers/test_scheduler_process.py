"""A scheduler that is killed has a successor, and nobody else notices. In virtual time."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from simulation.job import Outcome, SimulatedJob
from simulation.network import Weather

from kvstore.client import DistStore


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Nobody needs to read of each kill."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def program(store: DistStore) -> list[float]:
    """A bit of all that concerns the scheduler, and rounds."""
    out = torch.empty(3)
    for number in range(2):
        store.init(number, torch.full((3,), float(number)))
        store.barrier()
        for _ in range(2):
            store.push(number, torch.full((3,), 1.0 + store.rank))
            store.pull(number, out=out)
    store.barrier()
    return [float(value) for value in out]


def outcome(*kills: int, seed: int = 1, restarts: int = 1, work: Any = program) -> Outcome:
    """How a job ends whose scheduler is killed after these deliveries."""
    job = SimulatedJob(seed, Weather(repeat=0.05), servers=1, restarts=restarts, start_s=0.4)

    def happen() -> None:
        if job.network.deliveries in kills:
            job.world.after(0.0, lambda: job.kill("scheduler"))

    job.network.on_delivery = happen
    return job.run(work)


UNDISTURBED = outcome()
LAST = UNDISTURBED.deliveries - 3  # of a worker; for what follows, the end of the server, nobody is started again


def require_as_undisturbed(*kills: int) -> None:
    ended = outcome(*kills, restarts=len(kills))
    assert (ended.hanging, ended.errors) == ([], {}), f"{kills}\n{ended.trace()}"
    assert ended.results == UNDISTURBED.results
    assert ended.exit_codes["server 0"] == 0, kills
    assert ended.took_s < UNDISTURBED.took_s + 6.0, kills  # a successor takes 0.4 s on average, and up to 3 s


def test_a_scheduler_that_is_killed_changes_nothing() -> None:
    for at in range(2, LAST, 6):
        require_as_undisturbed(at)


@pytest.mark.faults
def test_a_scheduler_that_is_killed_after_any_message_changes_nothing() -> None:
    for at in range(1, LAST):
        require_as_undisturbed(at)


def test_a_successor_has_a_successor() -> None:
    require_as_undisturbed(UNDISTURBED.deliveries // 3, UNDISTURBED.deliveries // 2, UNDISTURBED.deliveries - 20)
