"""One run: a plan is carried out, and what became of it is judged."""

from __future__ import annotations

import random
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from faults.plan import Fault, Plan
from faults.processes import WRONG_EXIT, Processes, running

START_S, END_S = 30.0, 60.0
INTERRUPT_S = 0.02  # between two SIGINTs, on average


def spread(seconds: list[float], digits: int) -> str:
    """The median, the 95th percentile and the most of some times, in words."""
    times = sorted(seconds)
    p95 = times[min(len(times) - 1, int(0.95 * len(times)))]
    median = times[len(times) // 2]
    return f"median {median:.{digits}f} s, p95 {p95:.{digits}f} s, most {times[-1]:.{digits}f} s"


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        verdict: ``exact``, ``loud`` (it failed, and said so by name), or ``silent``: the one that must not be.
        why: of what is not exact.
        interrupts: how many exceptions signals have raised.
        output: what its processes have said.
    """

    verdict: str
    why: str
    interrupts: int
    output: str


def carry_out(plan: Plan) -> Outcome:
    """Start a job, do to it what the plan says, and wait for its end."""
    with running(plan) as processes:
        deadline = time.monotonic() + START_S
        while processes.output.count("training") < plan.workers and processes.alive and time.monotonic() < deadline:
            time.sleep(0.02)
        stopped: list[tuple[float, str]] = []
        for fault in plan.faults:
            _wait(processes, fault.after_s, stopped)
            _do(processes, fault, stopped)
        if plan.interrupts:
            _interrupt(processes, plan)
        _wait(processes, max([at for at, _ in stopped], default=0.0) - time.monotonic(), stopped)
        left = processes.wait(END_S)
        output = processes.output
        return judge(plan, processes.codes, left, output)


def _do(processes: Processes, fault: Fault, stopped: list[tuple[float, str]]) -> None:
    if fault.action == "cut":
        processes.cut(fault.member, fault.which)
    elif fault.action == "kill":
        processes.send(fault.member, signal.SIGKILL)
    else:
        processes.send(fault.member, signal.SIGSTOP)
        stopped.append((time.monotonic() + fault.last_s, fault.member))


def _wait(processes: Processes, seconds: float, stopped: list[tuple[float, str]]) -> None:
    until = time.monotonic() + seconds
    while True:
        now = time.monotonic()
        for at, name in list(stopped):
            if at <= now:
                processes.send(name, signal.SIGCONT)
                stopped.remove((at, name))
        processes.reap()
        if now >= until:
            return
        time.sleep(0.01)


def _interrupt(processes: Processes, plan: Plan) -> None:
    dice = random.Random(f"interrupts {plan.seed}")
    workers = [f"worker {rank}" for rank in range(plan.workers)]
    deadline = time.monotonic() + END_S
    while set(workers) <= set(processes.alive) and "exact" not in processes.output and time.monotonic() < deadline:
        processes.send(dice.choice(workers), signal.SIGINT)
        time.sleep(dice.expovariate(1 / INTERRUPT_S))


def judge(plan: Plan, codes: dict[str, int], left: list[str], output: str) -> Outcome:
    """Say how a run ended, from the members' exit codes, those that had to be killed at the end, and the output."""
    interrupts = sum(map(int, re.findall(r"and (\d+) interrupts", output)))
    workers = [codes.get(f"worker {rank}") for rank in range(plan.workers)]
    exact = output.count("exact after")
    relics = [str(path) for path in Path("/dev/shm").glob(f"kvstore-*-faults-{plan.seed}-*")]
    if WRONG_EXIT in workers or "Wrong:" in output:
        return Outcome("silent", "a value was wrong", interrupts, output)
    if left:
        return Outcome("silent", f"{', '.join(left)} had not ended after {END_S:g} s", interrupts, output)
    if relics:
        return Outcome("silent", f"{relics} stayed", interrupts, output)
    # Whoever the plan kills may have done its part by then: the others tell, who end well only if it has.
    killed = {fault.member for fault in plan.faults if fault.action == "kill"}
    well = all(code == 0 or (code == -signal.SIGKILL and member in killed) for member, code in codes.items())
    if well and exact == plan.workers:
        return Outcome("exact", "", interrupts, output)
    if all(code == 0 for code in workers) and exact < plan.workers:
        return Outcome("silent", "workers ended well that had not finished", interrupts, output)
    named = re.findall(r"(?:NodeLost|DeadlineExceeded|ServerError|KVStoreError)\S*: .*|the job has failed: .*", output)
    if not named:
        return Outcome("silent", f"it failed without a word: {codes}", interrupts, output)
    return Outcome("loud", named[0], interrupts, output)
