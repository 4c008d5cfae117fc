"""A few of the runs that ``make faults`` makes by the hundred."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from dataclasses import replace

import pytest
from waiting import LONG, until

from faults.killing import HEALED
from faults.launched import Launched, launched
from faults.orders import LONG as GIVEN_UP
from faults.orders import SEATS, Step, order
from faults.plan import KINDS, Fault, Plan, pushed, total
from faults.processes import WRONG_EXIT
from faults.running import ran
from faults.runs import judge

# ---- a few of the runs that ``make faults`` makes by the hundred: whatever happens, sums are exact or the job says so


EACH_S = 5 * LONG  # a run has deadlines of its own


def runs(*words: str) -> list[str]:
    """What ``python -m faults`` says of each kind."""
    done = ran("faults", *words, timeout=EACH_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if re.match(r"\w+: \d+ exact, ", line)]


@pytest.mark.long
@pytest.mark.timeout(EACH_S + 10)
def test_one_run_of_each_kind_is_right() -> None:
    """No value is wrong, each push counts once, no bit changes where servers are moved, and no checkpoint is torn."""
    done = ran("faults.few", timeout=EACH_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": right\n") == len(done.stdout.splitlines()) > 0


@pytest.mark.release
@pytest.mark.timeout(EACH_S + 10)
@pytest.mark.parametrize("kinds", [KINDS[1::2], KINDS[::2]], ids=",".join)
def test_runs_under_faults_are_exact_or_loud(kinds: tuple[str, ...]) -> None:
    for kind, said in zip(kinds, runs("0", "--rounds", "50", "--kinds", ",".join(kinds)), strict=True):
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


# ---- real processes of a job that are killed, stopped and continued in orders by seeds


LIMIT_S = 4.0  # of the heartbeat
HEARTBEAT = {"KVSTORE_HEARTBEAT_S": "0.2", "KVSTORE_HEARTBEAT_TIMEOUT_S": f"{LIMIT_S:g}"}
SIZE = ("-n", "1", "-s", "1", "--replicas", "1")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "cont": signal.SIGCONT}


class Driven:
    """A job, and what has been done to it."""

    def __init__(self, job: Launched) -> None:
        self.job = job
        self._pids: dict[str, int] = {}  # of what was stopped or killed
        self._silent: set[str] = set()  # stopped
        self._given_up: set[str] = set()
        self._heals = 0  # that there must be

    def do(self, step: Step) -> None:
        if step.action == "pass":
            self._pass(step.limits)
        elif step.action == "heal":
            self._wait(lambda: self.job.output.count(HEALED) >= self._heals)
            for name, pid in self._pids.items():
                self._wait(lambda name=name, pid=pid: name in self._silent or self.job.pid(name) not in (None, pid))
            self._pids.clear()
        else:
            self._send(step.action, step.member)

    def _pass(self, limits: float) -> None:
        end = limits * LIMIT_S
        with contextlib.suppress(AssertionError):
            until(lambda: self.job.process.poll() is not None, timeout=end)
        if limits >= GIVEN_UP:
            lost = {name for name in self._silent - self._given_up if name.startswith(SEATS)}
            self._heals += len(lost)
            self._given_up |= lost

    def _send(self, action: str, name: str) -> None:
        pid = self._pids[name] if action == "cont" or name in self._silent else self.job.pid(name)
        if pid is None:
            return  # the job is over
        self._pids[name] = pid
        if action == "kill" and name.startswith(SEATS) and name not in self._given_up:
            self._heals += 1
        if action == "stop":
            self._silent.add(name)
        else:
            if action == "cont" and name not in self._given_up:
                del self._pids[name]
            self._silent.discard(name)
            self._given_up.discard(name)
        try:
            os.kill(pid, SIGNALS[action])
        except ProcessLookupError:
            assert self.job.process.poll() is not None, self.job.output

    def _wait(self, condition: object) -> None:
        until(condition, over=lambda: self.job.output if self.job.process.poll() is not None else None)  # type: ignore[arg-type]


@pytest.mark.faults
@pytest.mark.timeout(5 * LONG)
@pytest.mark.parametrize("end", ["", *SEATS, "both"])
@pytest.mark.parametrize("seed", range(4))
def test_only_what_has_ended_a_job_is_named_and_who_comes_back_never_ends_it(seed: int, end: str) -> None:
    chosen = order(seed, ranks=1, ends=(end,))
    command = f'{sys.executable} -m faults.counting "$FAULTS_RUN" sync 0.05'
    with launched(command, HEARTBEAT, size=SIZE) as job:
        until(lambda: (job.directory / "round-0").exists() and (job.directory / "round-0").read_bytes())
        driven = Driven(job)
        for step in chosen.steps:
            driven.do(step)
        if not chosen.code:
            (job.directory / "stop").write_text("0")
        code = job.process.wait(LONG)
        said = f"{chosen}\n{job.output}"
        assert code == chosen.code, said
        last = job.output.splitlines()[-1]
        assert "is served by another process" not in job.output, said
        if chosen.code == 137:
            assert "was killed by SIGKILL" in last, said
        elif chosen.code:
            assert "SIGKILL" not in last, said


# ---- a full disk


@pytest.mark.release
def test_the_newest_checkpoint_is_whole_on_a_full_disk() -> None:
    if os.geteuid() != 0:
        pytest.skip("a disk that is full needs a mount, and that needs root")
    done = ran("faults.checkpoints", "4", "--full", timeout=LONG)
    if "mount" in done.stderr and "permission denied" in done.stderr:
        pytest.skip("this container may not mount")
    assert done.returncode == 0, done.stdout + done.stderr
