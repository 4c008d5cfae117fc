"""Real processes of a job that are killed, stopped and continued in orders by seeds; see ``orders.py``."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

import pytest
from waiting import LONG, until

from faults.killing import HEALED
from faults.launched import Launched, launched
from faults.orders import LONG as GIVEN_UP
from faults.orders import SEATS, Step, order

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
