"""A few of the runs that ``make faults`` makes by the hundred: whatever happens, sums are exact or the job says so."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from waiting import LONG

from faults.plan import KINDS, Fault, Plan, pushed, total
from faults.processes import WRONG_EXIT
from faults.running import ran
from faults.runs import judge

EACH_S = 5 * LONG  # a run has deadlines of its own


def runs(*words: str) -> list[str]:
    """What ``python -m faults`` says of each kind."""
    done = ran("faults", *words, timeout=EACH_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if re.match(r"\w+: \d+ exact, ", line)]


@pytest.mark.long
@pytest.mark.timeout(EACH_S + 10)
def test_runs_under_faults_are_exact_or_loud() -> None:
    for kind, said in zip(KINDS, runs("0", "--rounds", "50"), strict=True):
        assert said.startswith(f"{kind}: ")
        assert " 0 silent" in said
        assert "1 exact" in said or Plan.of(0, kind).kills


@pytest.mark.faults
@pytest.mark.timeout(EACH_S + 10)
def test_signals_at_any_moment_of_a_call_change_nothing() -> None:
    for said in runs("0", "--signals", "--rounds", "50", "--kinds", "shm,curve"):
        assert "1 exact, 0 loud (0 plans have a kill), 0 silent" in said
        assert int(re.findall(r"(\d+) interrupts", said)[0]) > 20


@pytest.mark.faults
@pytest.mark.timeout(EACH_S + 10)
def test_servers_with_standbys_and_the_scheduler_are_killed() -> None:
    """Each push counts once, and the bits are those of an undisturbed run."""
    what = ("--kills", "2", "--kinds", "curve", "--modes", "rows-coded", "--whom", "server,scheduler")
    done = ran("faults", "0", *what, timeout=EACH_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"curve rows-coded 0: exact, \d+ rounds", done.stdout)


WELL = dict.fromkeys(("worker 0", "worker 1", "server 0", "server 1", "scheduler 0"), 0)
BOTH = "[worker-0] exact after 50 pushes and 0 interrupts\n[worker-1] exact after 50 pushes and 0 interrupts\n"
LOST = "[worker-0] kvstore.errors.NodeLost: server 1 has died\n"
KILL = Fault(0.1, "kill", "scheduler 0", 0, 0.1)
PLAN = replace(Plan.of(0, "unix"), seed=-1, faults=())


@pytest.mark.parametrize(
    ("faults", "codes", "left", "output", "verdict"),
    [
        ((), {}, [], BOTH, "exact"),
        ((KILL,), {"scheduler 0": -9}, [], BOTH, "exact"),  # when the others had heard that the job is over
        ((), {"scheduler 0": -9}, [], BOTH, "silent"),  # by nobody of ours
        ((KILL,), {"server 0": -9}, [], BOTH, "silent"),
        ((KILL,), {"scheduler 0": -11}, [], BOTH, "silent"),
        ((KILL,), {"scheduler 0": -9, "server 0": 1}, [], BOTH, "silent"),
        ((KILL,), {"scheduler 0": -9}, ["server 0"], BOTH, "silent"),
        ((KILL,), {"scheduler 0": -9}, [], BOTH.splitlines()[0], "silent"),
        ((KILL,), {"scheduler 0": -9, "worker 0": 1, "worker 1": 1}, [], "", "silent"),
        ((KILL,), {"scheduler 0": -9, "worker 0": 1, "worker 1": 1}, [], LOST, "loud"),
        ((), {}, [], BOTH + "Wrong: 3 instead of 4", "silent"),
        ((), {"worker 0": WRONG_EXIT}, [], BOTH + LOST, "silent"),
    ],
)
def test_how_a_run_is_judged(
    faults: tuple[Fault, ...], codes: dict[str, int], left: list[str], output: str, verdict: str
) -> None:
    assert judge(replace(PLAN, faults=faults), WELL | codes, left, output).verdict == verdict


def test_a_seed_gives_the_same_plan_every_time() -> None:
    assert Plan.of(7, "tcp") == Plan.of(7, "tcp") == Plan.loads(Plan.of(7, "tcp").dumps())
    assert Plan.of(7, "tcp").faults != Plan.of(8, "tcp").faults


def test_the_sum_of_what_is_pushed() -> None:
    assert total(2, 0) == 0
    assert total(2, 2) == pushed(0, 1) + pushed(1, 1) + pushed(0, 2) + pushed(1, 2)
