"""Slow is not dead: who waits for a worker that is late, or busy where nobody can interrupt it, goes on waiting."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from jobs import job
from waiting import LONG

# Real numbers are sixty times these: a deadline of 60 s, and a worker that is 120 s late.
DEADLINE_S, LATE_S = 1.0, 3.0

LATE = """
    import sys, time
    import numpy as np
    import kvstore as kv

    def late(rank):
        if store.rank == rank:
            time.sleep(float(sys.argv[1]))

    store = kv.create("dist_sync")
    weight = np.zeros(4, np.float32)
    late(0)
    store.init("w", weight)
    late(1)
    store.pushpull("w", np.ones_like(weight), out=weight)
    late(0)
    store.barrier()
    store.push("w", weight)
    late(1)
    assert store.join() == 1
    assert (weight == 2).all()
    print("worker", store.rank, "is done", flush=True)
"""


@pytest.mark.release
def test_whoever_waits_for_a_worker_that_is_late_says_so_and_goes_on(tmp_path: Path) -> None:
    script = LATE.replace("sys.argv[1]", repr(str(LATE_S)))
    with job(tmp_path, script, servers=1, KVSTORE_TIMEOUT_S=f"{DEADLINE_S}") as running:
        assert running.wait() == 0, running.output
    for line in (
        "[worker 1] init of 'w' is not done after 1 s: the scheduler waits for worker 0 to init 'w'",
        "[worker 0] pushpull of 'w' is not done after 1 s: server 0 waits for worker 1, whose push 1 of 'w' is missing",
        "[worker 1] barrier is not done after 1 s: the scheduler waits at the barrier for worker 0",
        "[worker 0] join is not done after 1 s: server 0 waits for worker 1",
    ):
        assert line in running.output
        assert f"is at {tmp_path}/script.py:8 in late" in running.output.partition(line)[2].partition("\n")[0]
    assert running.output.count("is done") == 2


BUSY = """
    import ctypes, time
    import numpy as np
    import kvstore as kv

    store = kv.create("dist_sync")
    weight = np.zeros(4, np.float32)
    store.init("w", weight)
    store.barrier()
    if store.rank == 0:
        began = time.monotonic()
        ctypes.PyDLL(None).sleep(8)  # in C, with the interpreter's lock
        assert time.monotonic() - began > 7
    store.pushpull("w", np.ones_like(weight), out=weight)
    assert (weight == 2).all()
    print("worker", store.rank, "is done", flush=True)
"""
STOPS = """
    if store.rank == 0:
        time.sleep(1000)
    store.barrier()
"""
LIMITS = {"KVSTORE_HEARTBEAT_S": "0.2", "KVSTORE_HEARTBEAT_TIMEOUT_S": "4"}


@pytest.mark.long
def test_a_worker_that_is_busy_in_c_is_not_lost_and_one_that_is_stopped_is(tmp_path: Path) -> None:
    with job(tmp_path, BUSY + STOPS, servers=1, **LIMITS) as running:
        running.until(lambda: running.output.count("is done") == 2, "both workers")
        (stopped,) = running.members("worker", 0)
        os.kill(stopped, signal.SIGSTOP)
        assert running.wait(LONG) != 0
        lost = "NodeLost: worker 0 is lost: it has been silent for"
        reason = running.output.partition(lost)[2].partition("\n")[0]
        assert f"; it is stopped by a signal, and was at {tmp_path}/script.py:" in reason, running.output
        assert not running.members()


@pytest.mark.faults
@pytest.mark.long
def test_with_keys_a_worker_that_is_busy_in_c_is_not_lost_either(tmp_path: Path) -> None:
    with job(tmp_path, BUSY, servers=1, keys=True, **LIMITS) as running:
        assert running.wait() == 0, running.output
    assert running.output.count("is done") == 2


@pytest.mark.faults
@pytest.mark.long
def test_without_a_pulse_it_is(tmp_path: Path) -> None:
    """So the test before this one can fail."""
    with job(tmp_path, BUSY, servers=1, KVSTORE_PULSE="0", **LIMITS) as running:
        assert running.wait() != 0
    assert "worker 0 is lost: it has been silent for" in running.output
