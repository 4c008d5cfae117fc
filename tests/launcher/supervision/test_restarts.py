"""Which processes are started again, and when. The clock is a number."""

from __future__ import annotations

import pytest

from kvstore.errors import REPLACED_EXIT
from kvstore.job.processes import Exit
from launcher.job.description import RESTARTS, Cluster, Job
from launcher.job.tasks import Task
from launcher.supervision.restarts import (
    DELAY_S,
    ERRORS,
    LONGEST_S,
    SCHEDULER_LONGEST_S,
    SOON_S,
    TAKEOVER_S,
    Restarts,
    survivable,
)

TASKS = [Task("scheduler", 0, ("x",), {}), Task("server", 1, ("x",), {}), Task("standby", 1, ("x",), {})]
SCHEDULER, SERVER, STANDBY = range(3)
KILLED = Exit(signum=9)


def restarts(limit: int = 100) -> Restarts:
    made = Restarts(TASKS, frozenset({"scheduler", "server", "standby"}), limit)
    for index in range(len(TASKS)):
        assert made.begins(index, 0.0) == 1
    return made


def job(**options: object) -> Job:
    return Job(1, 2, ("x",), cluster=Cluster(**options))  # type: ignore[arg-type]


def test_servers_with_standbys_may_die_and_the_scheduler_if_it_is_started_again() -> None:
    assert survivable(job()) == frozenset()
    assert survivable(job(replicas=1)) == {"scheduler", "server", "standby"}
    assert survivable(job(replicas=1, restarts=0)) == {"server", "standby"}
    assert survivable(job(restarts=3)) == {"scheduler"}
    made = Restarts.of(job(replicas=1), TASKS)
    assert [made.survivable(index) for index in range(3)] == [True, True, True]
    assert [job().restarts, job(replicas=1).restarts, job(replicas=1, restarts=0).restarts] == [0, RESTARTS, 0]


def test_a_process_is_started_again_after_a_moment_without_a_word_of_ours() -> None:
    made = restarts()
    assert made.dies(SERVER, KILLED, 60.0) == (1, 60.0 + TAKEOVER_S, "")
    assert made.begins(SERVER, 61.0) == 2
    assert made.dies(SERVER, KILLED, 99.0) == (2, 99.0 + TAKEOVER_S, "")


def test_the_scheduler_is_started_again_at_once() -> None:
    made = restarts()
    assert made.dies(SCHEDULER, KILLED, 60.0).at == 60.0
    made.begins(SCHEDULER, 60.0)
    assert made.dies(SCHEDULER, KILLED, 61.0).at == 61.0 + DELAY_S


def test_a_scheduler_that_dies_again_and_again_is_not_missed_for_long() -> None:
    made = restarts()
    for now in range(9):
        made.begins(SCHEDULER, now)
        at = made.dies(SCHEDULER, KILLED, now + 0.1).at
        assert at is not None
    assert at == 8.1 + SCHEDULER_LONGEST_S


def test_a_loop_is_slowed_down_and_each_process_has_its_own() -> None:
    made, now, delays = restarts(), 0.0, []
    for _ in range(9):
        fate = made.dies(SERVER, KILLED, now)
        assert fate.at is not None
        delays.append(fate.at - now)
        now = fate.at
        made.begins(SERVER, now)
    assert delays == [1, 2, 4, 8, 16, LONGEST_S, LONGEST_S, LONGEST_S, LONGEST_S]
    assert fate.text == "it is started again in 30 s (9 of 100 restarts)"
    assert made.dies(STANDBY, KILLED, now).at == now + TAKEOVER_S
    later = now + SOON_S
    assert made.dies(SERVER, KILLED, later).at == later + TAKEOVER_S, "it has lived"


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        (2, "all 2 restarts are used up (--restarts); server 1 has no standby from now on"),
        (0, "nothing is restarted; server 1 has no standby from now on"),
    ],
)
def test_when_restarts_are_used_up_a_process_is_given_up(limit: int, text: str) -> None:
    made = restarts(limit)
    for index in (SERVER, STANDBY)[:limit]:
        assert made.dies(index, KILLED, 60.0).at is not None
    assert made.dies(STANDBY, KILLED, 120.0) == (1, None, text)
    assert made.dies(SCHEDULER, KILLED, 120.0).text == text.partition(";")[0]


def test_one_whose_host_is_lost_uses_up_no_restart() -> None:
    made = restarts(1)
    lost = Exit(1, text="was lost: it was silent for 10 s")
    fate = made.dies(SERVER, lost, 60.0, possible=False)
    assert fate == (1, None, "it cannot be started again; server 1 has no standby from now on")
    assert made.dies(STANDBY, KILLED, 60.0).at is not None


@pytest.mark.parametrize(
    ("how", "life_s", "given_up"),
    [
        (Exit(1), 0.5, True),
        (Exit(1), SOON_S, False),
        (KILLED, 0.5, False),
        (Exit(REPLACED_EXIT), 0.5, False),
        (Exit(1, text="could not be started again"), 0.5, False),
    ],
)
def test_one_that_ends_by_its_own_error_again_and_again_is_given_up(how: Exit, life_s: float, given_up: bool) -> None:
    made, now = restarts(), 0.0
    for _ in range(ERRORS):
        now += life_s
        fate = made.dies(SERVER, how, now)
        made.begins(SERVER, now)
    assert (fate.at is None) == given_up
    assert ("it has ended so 3 times soon after its start, and is given up" in fate.text) == given_up


# ---- workers without which the job goes on

WORKERS = [*TASKS, *(Task("worker", rank, ("x",), {}) for rank in range(3))]


def dead(made: Restarts, *workers: int) -> list[bool]:
    """Whether enough are left after the death of each of these."""
    return [made.dies(index, KILLED, 60.0).start > 0 and made.enough(0) for index in workers]


def test_workers_may_die_as_long_as_enough_are_left() -> None:
    made = Restarts(WORKERS, frozenset(), 0, min_workers=1)
    assert [made.spares(index) for index in (SERVER, STANDBY, SCHEDULER, 3)] == [False] * 3 + [True]
    assert dead(made, 3, 4, 5) == [True, True, False]
    assert made.enough(1)


def test_without_a_least_no_worker_may_die() -> None:
    assert not Restarts(WORKERS, frozenset(), 0).spares(3)


def test_the_least_is_that_of_the_job() -> None:
    three = Job(3, 1, ("x",), cluster=Cluster(min_workers=2))
    assert dead(Restarts.of(three, WORKERS), 3, 4) == [True, False]


def test_a_worker_that_is_started_again_is_left_again() -> None:
    made = Restarts(WORKERS, frozenset(), 3, min_workers=2)
    assert made.limited
    for index in range(len(WORKERS)):
        made.begins(index, 0.0)
    for now in (60.0, 120.0):
        assert made.dies(3, KILLED, now) == (now / 60, now + TAKEOVER_S, "")
        assert not made.too_few(3)
        made.begins(3, now)
    assert made.start(3) == 3
    assert dead(made, 4, 3) == [True, False], "worker 1 is not there yet"
    assert made.too_few(3) == "; 1 of 3 workers are left, and --min-workers is 2"


def test_a_worker_has_no_standby_to_lose_and_servers_count_for_no_worker() -> None:
    made = Restarts(WORKERS, frozenset({"server"}), 1, min_workers=2)
    for index in (SERVER, 3):
        made.begins(index, 0.0)
    made.dies(SERVER, KILLED, 60.0)
    made.begins(SERVER, 60.0)
    assert made.dies(3, KILLED, 60.0).text == "all 1 restarts are used up (--restarts)"
    assert made.enough(0)
    assert dead(made, 4) == [False]
    assert not Restarts(WORKERS, frozenset(), 0, min_workers=2).limited
