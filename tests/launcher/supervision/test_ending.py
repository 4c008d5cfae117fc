"""When a job ends, and how, without processes: the clock is a number."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest

from kvstore.errors import JOB_FAILED_EXIT, REPLACED_EXIT
from kvstore.job.contract import Role
from kvstore.job.exit_report import ExitReport
from kvstore.job.processes import Exit
from launcher.job.tasks import Task
from launcher.supervision.ending import Action, Ending, EndingLimits, Kill, Lose, Phase, Restart, Say, Tell
from launcher.supervision.restarts import TAKEOVER_S, Restarts

TASKS = [
    Task("scheduler", 0, ("x",), {}),
    Task("server", 0, ("x",), {}),
    *(Task("worker", i, ("x",), {}) for i in (0, 1)),
]


SCHEDULER, SERVER, WORKER_0, WORKER_1 = range(4)
LIMITS = EndingLimits()
TERM, KILL = Kill(signal.SIGTERM), Kill(signal.SIGKILL)


class Run:
    """An ending, and its clock."""

    def __init__(self, tasks: Sequence[Task] = TASKS, restarts: Restarts | None = None) -> None:
        self.now = 100.0
        self.leftovers = False
        self.ending = Ending(tasks, LIMITS, restarts)

    @property
    def over_with(self) -> int | None:
        """The exit code of a job that is over."""
        return self.ending.exit_code if self.ending.over else None

    def exit(self, *indices: int, code: int = 0, signum: int = 0) -> list[Action]:
        actions: list[Action] = []
        for index in indices:
            actions += self.ending.exited(index, Exit(code, signum), self.now)
        return actions + self.tick()

    def signal(self, signum: int) -> list[Action]:
        return self.ending.signalled(signum, self.now) + self.tick()

    def tick(self) -> list[Action]:
        return self.ending.tick(self.now, lambda: self.leftovers)

    def pass_deadline(self) -> list[Action]:
        """Nothing happens before it, and then what does is returned."""
        assert self.ending.deadline is not None
        self.now = self.ending.deadline - 0.001
        assert self.tick() == []
        self.now = self.ending.deadline
        return self.tick()


@pytest.fixture
def run() -> Run:
    return Run()


def test_all_is_well(run: Run) -> None:
    assert run.exit(WORKER_0) == []
    assert run.ending.deadline is None
    assert run.exit(WORKER_1) == []
    assert run.ending.phase is Phase.LINGER
    assert run.exit(SERVER, SCHEDULER) == []
    assert run.over_with == 0
    assert run.tick() == []


def test_servers_that_stay_are_sent_away_and_it_takes_less_than_two_seconds(run: Run) -> None:
    began = run.now
    run.exit(WORKER_0, WORKER_1)
    assert run.pass_deadline() == [TERM]
    assert run.pass_deadline() == [KILL]
    assert run.now - began < 1.8
    assert run.exit(SERVER, SCHEDULER, signum=9) == []
    assert run.over_with == 0


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
    assert run.over_with == 7


def test_the_window_closes_when_the_last_worker_has_spoken(run: Run) -> None:
    run.exit(WORKER_0, signum=9)
    assert run.ending.exit_code == 137
    assert run.exit(WORKER_1, code=1) == [TERM]
    assert run.exit(SERVER, SCHEDULER, signum=15) == []
    assert run.over_with == 137


@pytest.mark.parametrize("index", [SCHEDULER, SERVER])
def test_a_server_may_fail_too(run: Run, index: int) -> None:
    how = "was killed by SIGKILL"
    assert run.exit(index, signum=9) == [Tell(index, how)]
    assert run.ending.phase is Phase.WINDOW


def test_a_server_that_fails_after_the_workers_counts(run: Run) -> None:
    run.exit(WORKER_0, WORKER_1)
    assert run.exit(SERVER, code=4)[-1] == TERM
    run.exit(SCHEDULER, signum=15)
    assert run.over_with == 4


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
    assert run.over_with == 0


def test_an_aggregator_that_hears_of_a_failure_is_not_to_blame() -> None:
    run = Run([*TASKS, Task("aggregator", 0, ("x",), {})])
    assert run.exit(4, code=JOB_FAILED_EXIT) == []
    assert run.exit(WORKER_1, code=7) == [Tell(WORKER_1, "exited with code 7")]
    assert run.ending.exit_code == 7


def test_servers_that_leave_just_before_the_last_worker_are_in_time(run: Run) -> None:
    run.exit(SERVER)
    run.exit(WORKER_0, WORKER_1)
    run.exit(SCHEDULER)
    assert run.over_with == 0


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_all(run: Run, signum: int, code: int) -> None:
    assert run.signal(signum) == [TERM]
    assert run.exit(WORKER_0, code=1) == []
    assert run.pass_deadline() == [KILL]
    run.exit(WORKER_1, SERVER, SCHEDULER, signum=9)
    assert run.over_with == code


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
    assert run.over_with == 0


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


WITH_STANDBY = [*TASKS, Task("standby", 0, ("x",), {})]
STANDBY = 4


def with_standby(limit: int = 9, *roles: str) -> Run:
    made = Run(WITH_STANDBY, Restarts(WITH_STANDBY, frozenset(roles or ("server", "standby")), limit))
    assert made.tick() == []
    made.now += 60
    return made


def failed(cause: str, text: str = "server 0 was lost before its standby was in step") -> ExitReport:
    """What a process says that ends because the job has failed."""
    return ExitReport(text, consequence=True, cause=cause)


def given_up(text: str, how: str = "was killed by SIGKILL") -> list[Action]:
    return [Lose(SERVER, how, 1, final=True), Say(f"server 0 {how}; {text}; server 0 has no standby from now on")]


@pytest.mark.parametrize("index", [SERVER, STANDBY])
@pytest.mark.parametrize("exit", [{"signum": 9}, {"code": 1}, {"code": REPLACED_EXIT}])
def test_a_server_with_a_standby_may_die_and_is_started_again(index: int, exit: dict[str, int]) -> None:
    run = with_standby()
    actions = run.exit(index, **exit)
    assert actions == [Lose(index, str(Exit(**exit)), 1, final=False)]
    assert run.ending.phase is Phase.RUNNING
    assert run.ending.wake == run.now + TAKEOVER_S
    died = run.now
    run.now += 0.8 * TAKEOVER_S
    assert run.tick() == []
    run.now += 0.2 * TAKEOVER_S
    assert run.tick() == [Restart(index, 2, Exit(**exit), died)]
    assert run.ending.wake is None
    run.now += 60
    assert run.exit(index, signum=9)[0] == Lose(index, "was killed by SIGKILL", 2, False)
    run.exit(WORKER_0, WORKER_1)
    assert run.ending.phase is Phase.LINGER
    run.exit(SERVER, SCHEDULER, STANDBY)
    assert run.over_with == 0


def test_a_delay_that_one_notices_is_said() -> None:
    run = with_standby()
    for _ in range(2):
        *_, last = run.exit(SERVER, signum=9)
        run.now += 2
        run.tick()
    assert isinstance(last, Lose)
    *_, last = run.exit(SERVER, signum=9)
    assert last == Say("server 0 was killed by SIGKILL; it is started again in 2 s (3 of 9 restarts)")


def test_without_restarts_the_job_goes_on_without_a_standby() -> None:
    run = with_standby(0)
    assert run.exit(SERVER, signum=9) == given_up("nothing is restarted")
    assert run.ending.wake is None
    run.exit(WORKER_0, WORKER_1, STANDBY, SCHEDULER)
    assert run.over_with == 0


def test_a_lost_host_takes_its_servers_with_it() -> None:
    run = with_standby()
    how = Exit(1, text="was lost: ssh to b exited with code 255\n(its agent there was killed)")
    actions = run.ending.exited(SERVER, how, run.now, possible=False)
    one_line = "was lost: ssh to b exited with code 255 (its agent there was killed)"
    assert actions == given_up("it cannot be started again", one_line)
    assert run.ending.phase is Phase.RUNNING


def test_one_that_leaves_unasked_is_lost_too() -> None:
    run = with_standby()
    assert run.exit(SERVER) == []
    how = "exited with code 0 while workers were running"
    assert run.pass_deadline() == [Lose(SERVER, how, 1, final=False)]
    died, run.now = run.now, run.now + 1
    assert run.tick() == [Restart(SERVER, 2, Exit(1, text=how), died)]
    assert run.ending.deadline is None


@pytest.mark.parametrize("who", [SCHEDULER, WORKER_0])
@pytest.mark.parametrize("dead", [SERVER, STANDBY])
def test_if_the_job_fails_for_it_all_the_same_it_gets_the_blame(who: int, dead: int) -> None:
    run = with_standby()
    run.exit(dead, signum=9)
    run.ending.reported(who, failed("start 1 of server 0" if dead == SERVER else "start 1 of standby 0"))
    assert run.exit(who, code=JOB_FAILED_EXIT if who == SCHEDULER else 1) == [Tell(dead, "was killed by SIGKILL")]
    assert run.ending.phase is Phase.WINDOW
    assert run.ending.exit_code == 137
    assert run.ending.wake == run.ending.deadline, "nothing is started again"


def test_of_two_deaths_the_last_is_fatal() -> None:
    run = with_standby()
    run.exit(SERVER, signum=9)
    run.exit(STANDBY, code=1)
    run.ending.reported(SCHEDULER, failed("start 1 of standby 0"))
    assert run.exit(SCHEDULER, code=JOB_FAILED_EXIT) == [Tell(STANDBY, "exited with code 1")]
    assert run.ending.exit_code == 1


@pytest.mark.parametrize("dead", [SERVER, STANDBY])
@pytest.mark.parametrize("zombie", [SERVER, STANDBY])
@pytest.mark.parametrize("done", [False, True])
def test_who_was_given_up_and_comes_back_is_never_what_the_job_ends_by(dead: int, zombie: int, done: bool) -> None:
    run = with_standby()
    run.exit(dead, signum=9)
    run.now += 60
    assert [type(action) for action in run.tick()] == [Restart]
    run.now += 60
    run.ending.reported(zombie, failed("", "server 0 is served by another process, in view 5"))
    if done:
        run.exit(WORKER_0, WORKER_1)
    start = 2 if zombie == dead else 1
    lost = [Lose(zombie, "exited with code 4", start, final=False)]
    assert run.exit(zombie, code=REPLACED_EXIT) == ([] if done else lost)
    assert run.ending.failure is None


def test_of_one_member_the_process_is_to_blame_that_the_reports_name() -> None:
    run = with_standby()
    for how in ({"signum": 9}, {"code": 7}):
        run.exit(SERVER, **how)
        run.now += 60
        run.tick()
    run.ending.reported(WORKER_0, failed("start 1 of server 0"))
    assert run.exit(WORKER_0, code=1) == [Tell(SERVER, "was killed by SIGKILL")]


@pytest.mark.parametrize("cause", ["", "start 2 of server 0", "start 1 of standby 0"])
def test_a_death_that_has_healed_is_not_to_blame_for_another_loss_of_the_same_rank(cause: str) -> None:
    run = with_standby()
    run.exit(SERVER, signum=9)
    run.now += 60
    run.tick()
    silent = failed(cause, "server 0 has been silent for 3.0 s, and had no standby at that time")
    for who in (SCHEDULER, WORKER_0):
        run.ending.reported(who, silent)
    assert run.exit(SCHEDULER, code=JOB_FAILED_EXIT) == []
    assert run.exit(WORKER_0, code=1) == [Tell(WORKER_0, "exited with code 1")]


def test_who_was_refused_and_does_not_know_why_is_answered_for_by_the_scheduler() -> None:
    run = with_standby()
    run.exit(SERVER, signum=9)
    run.ending.reported(SCHEDULER, failed("start 1 of server 0"))
    run.ending.reported(WORKER_0, failed(""))
    assert run.exit(WORKER_0, code=1) == [Tell(SERVER, "was killed by SIGKILL")]


@pytest.mark.parametrize("exit", [{"signum": 9}, {"code": 1}, {"code": REPLACED_EXIT}])
def test_who_dies_after_the_job_has_failed_for_something_else_has_not_failed_it(exit: dict[str, int]) -> None:
    run = with_standby()
    run.ending.reported(SCHEDULER, failed("", "worker 1 is lost: it has been silent for 30 s"))
    run.exit(SCHEDULER, code=JOB_FAILED_EXIT)
    assert run.exit(SERVER, **exit) == []
    assert run.exit(WORKER_1, signum=9) == [Tell(WORKER_1, "was killed by SIGKILL")]


def test_what_the_job_has_failed_for_may_be_seen_to_die_after_the_others_have_said_so() -> None:
    run = with_standby()
    run.ending.reported(SCHEDULER, failed("start 1 of server 0"))
    run.exit(SCHEDULER, code=JOB_FAILED_EXIT)
    assert run.exit(STANDBY, signum=9) == []
    assert run.exit(SERVER, code=1) == [Tell(SERVER, "exited with code 1")]


def test_a_death_long_ago_is_not_to_blame_for_another_failure() -> None:
    run = with_standby()
    run.exit(SERVER, signum=9)
    run.ending.reported(SCHEDULER, ExitReport("worker 1 was lost: silent for 30 s", consequence=True))
    assert run.exit(SCHEDULER, code=JOB_FAILED_EXIT) == []
    run.now += 5
    assert run.tick() == [], "a job that fails starts nothing again"
    assert run.exit(WORKER_1, code=7) == [Tell(WORKER_1, "exited with code 7")]
    assert run.ending.exit_code == 7


def test_who_dies_after_the_job_has_failed_has_failed() -> None:
    run = with_standby()
    run.exit(SCHEDULER, code=JOB_FAILED_EXIT)
    assert run.exit(SERVER, signum=9) == [Tell(SERVER, "was killed by SIGKILL")]
    assert run.ending.exit_code == 137


@pytest.mark.parametrize("exit", [{"signum": 9}, {"code": 1}, {"code": JOB_FAILED_EXIT}, {}])
@pytest.mark.parametrize("done", [(SCHEDULER,), (WORKER_0, WORKER_1)])
def test_when_no_worker_needs_it_its_death_is_nothing(done: tuple[int, ...], exit: dict[str, int]) -> None:
    """The scheduler has seen all workers leave their stores, or they have ended."""
    run = with_standby()
    run.exit(*done)
    assert run.exit(SERVER, **exit) == []
    assert run.exit(STANDBY, **exit) == []
    run.exit(*{WORKER_0, WORKER_1, SCHEDULER} - set(done))
    assert run.over_with == 0


def test_what_waits_to_be_started_again_is_not_when_the_workers_have_ended() -> None:
    run = with_standby()
    run.exit(SERVER, signum=9)
    run.exit(WORKER_0, WORKER_1)
    assert run.ending.phase is Phase.LINGER
    run.now += 0.9
    assert run.tick() == []
    run.exit(SCHEDULER, STANDBY)
    assert run.ending.over


def test_a_worker_and_an_aggregator_may_not_die() -> None:
    run = with_standby()
    assert run.exit(WORKER_0, signum=9) == [Tell(WORKER_0, "was killed by SIGKILL")]


def test_a_scheduler_that_may_die_is_started_again_at_once_or_the_job_fails() -> None:
    run = with_standby(1, "scheduler")
    assert run.exit(SCHEDULER, signum=9) == [
        Lose(SCHEDULER, "was killed by SIGKILL", 1, False),  # of which its successor tells the user
        Restart(SCHEDULER, 2, Exit(signum=9), run.now),
    ]
    assert run.exit(SERVER, code=1) == [Tell(SERVER, "exited with code 1")], "its own failure, as ever"
    run = with_standby(1, "scheduler")
    run.exit(SCHEDULER, signum=9)
    run.now += 60
    assert run.exit(SCHEDULER, code=1) == [Tell(SCHEDULER, "exited with code 1")]
    assert run.ending.exit_code == 1


# ---- workers that die while the job goes on


def sparing(least: int = 1, restarts: int = 0) -> Run:
    made = Run(restarts=Restarts(TASKS, frozenset(), restarts, min_workers=least))
    assert made.tick() == []
    return made


@pytest.mark.parametrize("exit", [{"signum": 9}, {"code": 1}])
def test_a_worker_without_which_enough_are_left_is_lost_and_the_job_ends_well(exit: dict[str, int]) -> None:
    run = sparing()
    how = "was killed by SIGKILL" if "signum" in exit else "exited with code 1"
    assert run.exit(WORKER_0, **exit) == [Lose(WORKER_0, how, 1, True)]
    run.now += 60
    assert run.tick() == []
    assert run.exit(WORKER_1) == []
    assert run.ending.phase is Phase.LINGER
    run.exit(SCHEDULER, SERVER)
    assert run.over_with == 0


@pytest.mark.parametrize("exit", [{"signum": 9}, {"code": 1}, {"code": 0}])
def test_so_is_an_aggregator_and_nothing_takes_its_place(exit: dict[str, int]) -> None:
    tasks = [*TASKS, Task("aggregator", 0, ("x",), {})]
    run = Run(tasks, restarts=Restarts(tasks, frozenset(), 9, min_workers=2))
    assert run.tick() == []
    lost = run.exit(len(TASKS), **exit)
    if not lost:
        run.now += 3.1
        lost = run.tick()
    assert [type(action) for action in lost] == [Lose]
    run.now += 60
    assert run.tick() == []
    assert run.exit(WORKER_0, WORKER_1) == []
    run.exit(SCHEDULER, SERVER)
    assert run.over_with == 0


def test_the_last_that_dies_when_all_others_have_ended_lets_the_job_end() -> None:
    run = sparing()
    assert run.exit(WORKER_0) == []
    assert run.exit(WORKER_1, signum=9) == [Lose(WORKER_1, "was killed by SIGKILL", 1, True)]
    assert run.ending.phase is Phase.LINGER


def test_one_too_many_fails_the_job_by_its_name() -> None:
    run = sparing()
    run.exit(WORKER_0, signum=9)
    run.now += 5
    actions = run.exit(WORKER_1, signum=11)
    assert Tell(WORKER_1, "was killed by SIGSEGV; 0 of 2 workers are left, and --min-workers is 1") in actions
    run.exit(SCHEDULER, SERVER, code=JOB_FAILED_EXIT)
    assert run.over_with == 128 + 11


def test_below_the_least_the_job_waits_for_those_that_are_started_again() -> None:
    run = sparing(least=2, restarts=1)
    run.now += 60
    assert run.exit(WORKER_0, signum=9) == [Lose(WORKER_0, "was killed by SIGKILL", 1, False)]
    run.now += 60
    assert [type(action) for action in run.tick()] == [Restart]
    actions = run.exit(WORKER_0, signum=9)
    assert actions == [Tell(WORKER_0, "was killed by SIGKILL; 1 of 2 workers are left, and --min-workers is 2")]


def test_one_that_was_given_up_and_comes_back_has_not_failed_the_job() -> None:
    run = sparing()
    own = ExitReport("worker 0 was given up", consequence=True, cause="start 1 of worker 0")
    run.ending.reported(WORKER_0, own)
    assert run.exit(WORKER_0, code=JOB_FAILED_EXIT) == [Lose(WORKER_0, "exited with code 3", 1, True)]
    run.exit(WORKER_1)
    run.exit(SCHEDULER, SERVER)
    assert run.over_with == 0


@pytest.mark.parametrize("last", [SCHEDULER, WORKER_1], ids=["the scheduler last", "a worker last"])
def test_nobody_waits_for_one_that_was_given_up_and_never_ends(last: int) -> None:
    run = sparing()
    for index in sorted([SCHEDULER, WORKER_1], key=lambda each: each == last):
        assert run.ending.phase is Phase.RUNNING
        if index == SCHEDULER:
            given_up = ExitReport("ended without it", consequence=True, given_up="start 1 of worker 0")
            run.ending.reported(SCHEDULER, given_up)
        run.exit(index)
    assert run.ending.phase is Phase.LINGER
    run.exit(SERVER)
    run.now += 60
    assert run.tick() == [Kill(signal.SIGTERM)]
    run.now += 60
    assert run.tick() == [Kill(signal.SIGKILL)]
    run.exit(WORKER_0, signum=9)
    assert run.over_with == 0


def test_nobody_waits_for_one_that_is_started_again_and_comes_when_the_job_is_over() -> None:
    run = Run(restarts=Restarts(TASKS, frozenset(), 5, min_workers=1))
    run.tick()
    run.now += 60
    run.exit(WORKER_0, signum=9)
    run.now += 60
    assert [type(action) for action in run.tick()] == [Restart]
    given_up = ExitReport("ended without it", consequence=True, given_up="start 2 of worker 0")
    run.ending.reported(SCHEDULER, given_up)
    run.exit(SCHEDULER, SERVER)
    assert run.ending.phase is Phase.RUNNING, "worker 1 needs time to exit"
    run.exit(WORKER_1)
    assert run.ending.phase is Phase.LINGER
    run.now += 60
    assert run.tick() == [Kill(signal.SIGTERM)]
    run.exit(WORKER_0, signum=15)
    assert run.over_with == 0


def test_one_that_comes_back_when_the_job_is_over_finds_no_scheduler_and_has_not_failed_it() -> None:
    run = sparing()
    assert run.exit(WORKER_1, SCHEDULER, SERVER) == []
    run.ending.reported(WORKER_0, ExitReport("the scheduler has been silent for 3.0 s", consequence=True))
    assert run.exit(WORKER_0, code=1) == [Lose(WORKER_0, "exited with code 1", 1, True)]
    assert run.over_with == 0


def test_one_that_ends_because_the_job_has_failed_is_not_spared() -> None:
    run = sparing()
    run.ending.reported(WORKER_0, failed("start 1 of server 0", "server 0 was killed"))
    assert not [action for action in run.exit(WORKER_0, code=JOB_FAILED_EXIT) if isinstance(action, Lose)]


def test_one_that_may_be_started_again_is() -> None:
    run = sparing(restarts=2)
    run.now += 60
    assert run.exit(WORKER_0, signum=9) == [Lose(WORKER_0, "was killed by SIGKILL", 1, False)]
    assert run.tick() == []
    run.now += 0.2
    assert run.tick() == [Restart(WORKER_0, 2, Exit(signum=9), run.now - 0.2)]
    run.exit(WORKER_1)
    assert run.ending.phase is Phase.RUNNING, "the newcomer runs"
    run.exit(WORKER_0)
    assert run.ending.phase is Phase.LINGER
    run.exit(SCHEDULER, SERVER)
    assert run.over_with == 0


def test_nobody_is_started_again_once_all_others_have_ended() -> None:
    run = sparing(restarts=2)
    run.now += 60
    run.exit(WORKER_0, signum=9)
    assert run.exit(WORKER_1) == []
    run.now += 0.2
    assert not [action for action in run.tick() if isinstance(action, Restart)]
    run.exit(SCHEDULER, SERVER)
    assert run.over_with == 0


def test_nor_the_last_one_nor_after_the_last_restart_and_the_user_is_told() -> None:
    run = sparing(restarts=1)
    run.now += 60
    run.exit(WORKER_0, signum=9)
    run.now += 60
    run.tick()
    lose, say = run.exit(WORKER_0, signum=9)
    assert lose == Lose(WORKER_0, "was killed by SIGKILL", 2, True)
    assert say == Say("worker 0 was killed by SIGKILL; all 1 restarts are used up (--restarts)")
    run.exit(WORKER_1)
    assert run.ending.phase is Phase.LINGER
    run = sparing(restarts=1)
    run.exit(WORKER_1)
    assert run.exit(WORKER_0, signum=9) == [Lose(WORKER_0, "was killed by SIGKILL", 1, True)]


# ---- a server that is moved


def moving(index: int = SERVER) -> Run:
    run = Run(restarts=Restarts(TASKS, frozenset({"server", "standby"}), 1))
    run.tick()
    run.ending.moving = index
    return run


@pytest.mark.parametrize("code", [0, REPLACED_EXIT])
def test_a_server_that_is_moved_is_started_anew_at_once_and_uses_up_no_restart(code: int) -> None:
    run = moving()
    assert run.exit(SERVER, code=code) == [Restart(SERVER, 2, Exit(code), run.now)]
    assert run.ending.runs(SERVER)
    assert run.ending.deadline is None
    lost = run.exit(SERVER, signum=signal.SIGKILL)
    assert lost == [Lose(SERVER, "was killed by SIGKILL", 2, False)]
    run.now += 60.0
    assert [type(action) for action in run.tick()] == [Restart], "the one restart that the job has"


def test_a_server_that_dies_while_it_is_to_be_moved_is_lost_as_ever() -> None:
    run = moving()
    assert run.exit(SERVER, signum=signal.SIGKILL) == [Lose(SERVER, "was killed by SIGKILL", 1, False)]
    assert run.ending.moving is None


def test_nothing_is_moved_any_more_when_the_workers_are_done() -> None:
    run = moving()
    assert run.exit(WORKER_0, WORKER_1) == []
    assert run.exit(SERVER) == []
