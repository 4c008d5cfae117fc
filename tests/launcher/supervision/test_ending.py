"""When a job ends, and how, without processes: the clock is a number."""

from __future__ import annotations

import signal

import pytest
from ending_run import KILL, SCHEDULER, SERVER, TASKS, TERM, WORKER_0, WORKER_1, Run

from kvstore.errors import JOB_FAILED_EXIT
from kvstore.job.contract import Role
from launcher.job.tasks import Task
from launcher.supervision.ending import Phase, Say, Tell


@pytest.fixture
def run() -> Run:
    return Run()


def test_all_is_well(run: Run) -> None:
    assert run.exit(WORKER_0) == []
    assert run.ending.deadline is None
    assert run.exit(WORKER_1) == []
    assert run.ending.phase is Phase.LINGER
    assert run.exit(SERVER, SCHEDULER) == []
    assert run.ending.over
    assert run.ending.exit_code == 0
    assert run.tick() == []


def test_servers_that_stay_are_sent_away_and_it_takes_less_than_two_seconds(run: Run) -> None:
    began = run.now
    run.exit(WORKER_0, WORKER_1)
    assert run.pass_deadline() == [TERM]
    assert run.pass_deadline() == [KILL]
    assert run.now - began < 1.8
    assert run.exit(SERVER, SCHEDULER, signum=9) == []
    assert run.ending.over
    assert run.ending.exit_code == 0


def test_a_failure_is_told_then_survivors_have_a_window(run: Run) -> None:
    began = run.now
    how = "exited with code 7"
    assert run.exit(WORKER_1, code=7) == [Tell(WORKER_1, how)]
    assert run.exit(SERVER, code=1) == []  # the first one counts
    assert run.pass_deadline() == [TERM]
    assert run.now - began == pytest.approx(1.5)
    assert run.pass_deadline() == [KILL]
    assert run.pass_deadline() == [Say("gave up waiting for scheduler, worker 0 to die after SIGKILL")]
    assert run.now - began < 5
    assert run.ending.over
    assert run.ending.exit_code == 7


def test_the_window_closes_when_the_last_worker_has_spoken(run: Run) -> None:
    run.exit(WORKER_0, signum=9)
    assert run.ending.exit_code == 137
    assert run.exit(WORKER_1, code=1) == [TERM]
    assert run.exit(SERVER, SCHEDULER, signum=15) == []
    assert run.ending.over
    assert run.ending.exit_code == 137


@pytest.mark.parametrize("index", [SCHEDULER, SERVER])
def test_a_server_may_fail_too(run: Run, index: int) -> None:
    how = "was killed by SIGKILL"
    assert run.exit(index, signum=9) == [Tell(index, how)]
    assert run.ending.phase is Phase.WINDOW


def test_a_server_that_fails_after_the_workers_counts(run: Run) -> None:
    run.exit(WORKER_0, WORKER_1)
    assert run.exit(SERVER, code=4)[-1] == TERM
    run.exit(SCHEDULER, signum=15)
    assert run.ending.over
    assert run.ending.exit_code == 4


@pytest.mark.parametrize("role", ["server", "aggregator"])
def test_a_server_or_aggregator_that_leaves_without_being_told_to_is_a_failure(role: Role) -> None:
    tasks = list(TASKS)
    tasks[SERVER] = Task(role, 0, ("x",), {})
    run = Run(tasks)
    assert run.exit(SERVER) == []
    assert run.exit(WORKER_0) == []
    how = "exited with code 0 while workers were running"
    assert run.pass_deadline() == [Tell(SERVER, how)]
    assert run.ending.exit_code == 1


@pytest.mark.parametrize("order", [(SERVER, SCHEDULER), (SCHEDULER, SERVER)])
def test_workers_may_stay_when_the_scheduler_says_that_they_have_left(run: Run, order: tuple[int, int]) -> None:
    for index in order:
        assert run.exit(index) == []
    assert run.ending.deadline is None
    assert run.ending.phase is Phase.RUNNING
    run.exit(WORKER_0, WORKER_1)
    assert run.ending.over
    assert run.ending.exit_code == 0


def test_an_aggregator_that_hears_of_a_failure_is_not_to_blame() -> None:
    run = Run([*TASKS, Task("aggregator", 0, ("x",), {})])
    assert run.exit(4, code=JOB_FAILED_EXIT) == []
    assert run.exit(WORKER_1, code=7) == [Tell(WORKER_1, "exited with code 7")]
    assert run.ending.exit_code == 7


def test_servers_that_leave_just_before_the_last_worker_are_in_time(run: Run) -> None:
    run.exit(SERVER)
    run.exit(WORKER_0, WORKER_1)
    run.exit(SCHEDULER)
    assert run.ending.over
    assert run.ending.exit_code == 0


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_all(run: Run, signum: int, code: int) -> None:
    assert run.signal(signum) == [TERM]
    assert run.exit(WORKER_0, code=1) == []
    assert run.pass_deadline() == [KILL]
    run.exit(WORKER_1, SERVER, SCHEDULER, signum=9)
    assert run.ending.over
    assert run.ending.exit_code == code


def test_a_second_interrupt_kills_at_once(run: Run) -> None:
    run.signal(signal.SIGINT)
    assert run.signal(signal.SIGTERM) == []
    assert run.signal(signal.SIGINT) == [KILL]
    assert run.signal(signal.SIGINT) == []
    assert run.ending.exit_code == 130


def test_a_signal_cuts_the_window_short_and_leaves_the_code(run: Run) -> None:
    run.exit(WORKER_0, code=7)
    assert run.signal(signal.SIGINT) == [TERM]
    assert run.ending.exit_code == 7


def test_what_processes_leave_behind_is_ended_too(run: Run) -> None:
    run.leftovers = True
    run.exit(WORKER_0, WORKER_1, SERVER)
    assert run.exit(SCHEDULER) == [TERM]
    assert run.tick() == []
    assert run.pass_deadline() == [KILL]
    assert run.pass_deadline() == [Say("gave up waiting for a process they started to die after SIGKILL")]
    assert run.ending.over


def test_leftovers_have_their_grace(run: Run) -> None:
    run.leftovers = True
    run.exit(WORKER_0, WORKER_1, SERVER, SCHEDULER)
    run.leftovers = False
    assert run.tick() == []
    assert run.ending.over
    assert run.ending.exit_code == 0


def test_who_says_that_another_has_failed_leaves_the_blame_to_that_one(run: Run) -> None:
    assert run.exit(SERVER, SCHEDULER, code=JOB_FAILED_EXIT) == []
    how = "exited with code 7"
    assert run.exit(WORKER_0, code=7)[0] == Tell(WORKER_0, how)
    assert run.ending.exit_code == 7


def test_who_has_failed_may_take_its_time_to_exit(run: Run) -> None:
    run.exit(SERVER, code=JOB_FAILED_EXIT)
    run.now += 9.9  # an interpreter with torch in it ends, on a busy machine
    assert run.tick() == []
    assert run.exit(WORKER_1, code=7)[0] == Tell(WORKER_1, "exited with code 7")
    assert run.ending.exit_code == 7


def test_a_server_that_leaves_in_order_changes_nothing_of_that(run: Run) -> None:
    run.exit(SCHEDULER, code=JOB_FAILED_EXIT)
    deadline = run.ending.deadline
    assert run.exit(SERVER) == []
    assert run.ending.deadline == deadline
    assert run.pass_deadline()[0] == Tell(SCHEDULER, "ended because the job had failed")


@pytest.mark.parametrize("workers_end", [True, False])
def test_a_job_that_failed_without_a_culprit_has_failed_all_the_same(run: Run, workers_end: bool) -> None:
    assert run.exit(SCHEDULER, code=JOB_FAILED_EXIT) == []
    actions = run.exit(WORKER_0, WORKER_1) if workers_end else run.pass_deadline()
    assert actions[0] == Tell(SCHEDULER, "ended because the job had failed")
    assert run.ending.exit_code == 1


def test_the_same_after_the_workers(run: Run) -> None:
    run.exit(WORKER_0, WORKER_1)
    assert run.exit(SCHEDULER, code=JOB_FAILED_EXIT)[0] == Tell(SCHEDULER, "ended because the job had failed")
    assert run.ending.exit_code == 1
