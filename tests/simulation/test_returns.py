"""Jobs in which workers that die are started again, in virtual time: what was answered counts once; nobody waits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from simulation.job import SimulatedJob
from simulation.returns import BASE, REST_S, Progress, Run, outcome_of, returning
from simulation.runs import WORKERS, Plan, carry_out_in, exhaustive, job_of, never_right
from small_jobs import value_of

from kvstore.client import DistStore
from kvstore.client.newcomers import Newcomers
from kvstore.client.requests import WorkerBarriers
from servers.scheduler.newcomers import Newcomers as Sponsors


def require(plan: Plan, *wanted: str) -> int:
    """Carry out a plan, whose verdict must be one of those; return how many workers have come back."""
    run = Run(plan)
    assert run.verdict in wanted, f"{plan}: {run.verdict}\n{run.outcome.trace()}"
    return sum(start > 1 for _, start in run.program.entered)


@pytest.mark.parametrize("rank", range(3))
def test_a_worker_that_dies_at_any_moment_comes_back(rank: int) -> None:
    """Some of all its moments; ``python -m simulation 0 --returns --crashes`` makes all, of all workers."""
    plans = [replace(BASE, crashes=((f"worker {rank}", at),)) for at in range(30 + rank, 200, 34)]
    assert sum(require(plan, "exact") for plan in plans) >= 2


@pytest.mark.parametrize("program", ["return", "return rows"])
def test_whoever_dies_while_one_comes_back(program: str) -> None:
    """Worker 0 is to let worker 2 in, which may die, too."""
    plan = replace(BASE, program=program, crashes=(("worker 2", 80),))
    for each in exhaustive(plan, WORKERS[::2], 83, 61, outcome_of):
        require(each, "exact")


def test_runs_by_seeds_are_exact_or_rightly_loud() -> None:
    """Several deaths, of servers and the scheduler, too, and links that fail; the last two were wrong once."""
    came = sum(require(returning(seed), "exact", "loud") for seed in (*range(8), 219, 366))
    assert came >= 3


@pytest.mark.parametrize("mode", ["sync", "ssp"])
def test_below_the_least_rounds_stand_still_until_it_has_come_back(mode: str) -> None:
    """Without that the others would be done before it comes."""
    for rank, at in ((0, 76), (1, 99), (2, 122)):
        plan = replace(BASE, mode=mode, least=3, start_s=5.0, crashes=((f"worker {rank}", at),))
        assert require(plan, "exact") == 1


@pytest.mark.parametrize("mode", ["sync", "ssp", "drop"])
def test_workers_are_added_while_others_die(mode: str) -> None:
    """A sum stands for as many as there were at the start: ``Run`` adds up what has counted in each round."""
    plan = replace(BASE, mode=mode, added=(60, 85))
    crashes = ((), (("worker 1", 90),), (("worker 3", 120),))
    plans = [replace(plan, crashes=each) for each in crashes]
    plans += [replace(plan, replicas=1), replace(plan, uneven=mode == "sync")]
    runs = [Run(each) for each in plans]
    assert [run.verdict for run in runs] == ["exact"] * len(runs)
    assert all({3, 4} & {rank for rank, _ in run.program.entered} for run in runs)


@pytest.mark.parametrize("grows", [0, 8], ids=["", "grown"])
@pytest.mark.parametrize("alone", [False, True], ids=["all publish", "the first publishes"])
def test_whoever_publishes_in_place_of_a_lost_worker_publishes_its_own_values(alone: bool, grows: int) -> None:
    """Where the first worker publishes alone, the others have not counted its versions.

    A state that ``grows`` has more arrays from that step on, and may then be larger than what a lost worker had.
    """
    for at in range(60, 150, 30):
        plan = replace(BASE, crashes=(("worker 0", at),))
        job = job_of(plan)
        numbers: list[int] = []

        def publish(store: DistStore, numbers: list[int] = numbers, job: SimulatedJob = job) -> int:
            some = torch.ones(2)
            progress = Progress()
            store.attach("progress", progress, shared=True)
            store.boundary()
            assert job.world.current is not None
            while progress.step < 40:
                progress.step += 1
                leads = store.rank == store.members()[0]
                if leads or not alone:
                    value = 100.0 * progress.step + store.rank
                    more = {} if progress.step < grows else {"x": some, "y": some, "z": some}  # on both servers
                    state = {**more, "w": torch.full((4,), value)}
                    number = store.publish_state(state, label=str(progress.step))
                    if leads and store.rank == store.members()[0]:  # else another has come back meanwhile
                        assert value_of(store, "w", 4).tolist() == [value] * 4
                        numbers.append(number)
                job.world.current.wait(REST_S)
                store.boundary()
            return store.rank

        outcome = carry_out_in(job, plan, publish)
        assert never_right(outcome) == "", f"{plan}: {outcome.errors}\n{outcome.trace()}"
        assert not outcome.errors, f"{plan}: {outcome.errors}\n{outcome.trace()}"
        assert len(numbers) > 10, f"{plan}: versions {numbers}"
        assert numbers == sorted(numbers), f"{plan}: versions {numbers}"


# ---- what is broken is found


def nothing(*_: Any) -> None: ...


MUTATIONS: dict[str, tuple[type, str, int]] = {  # with the seed: odd ones have barriers
    "its sponsor is not told": (Sponsors, "tell", 0),
    "it pushes as if from the beginning": (Newcomers, "take_clocks", 0),
    "it comes to barriers from the first on": (WorkerBarriers, "pass_to", 1),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, seed = MUTATIONS[name]
    plans = [replace(BASE, seed=seed, crashes=(("worker 2", at),)) for at in (70, 90, 110)]
    came = sum(require(plan, "exact") for plan in plans)
    monkeypatch.setattr(owner, attribute, nothing)
    runs = [Run(plan) for plan in plans]
    fewer = sum(start > 1 for run in runs for _, start in run.program.entered) < came
    assert fewer or any(run.verdict not in ("exact", "loud") for run in runs)
