"""Whole jobs, with real processes, real sockets and real deaths; and slow workers, which are not dead."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from jobs import job
from waiting import LONG

from kvstore.transport.shm.presence import available

ROUNDS = """
    import numpy as np
    import kvstore as kv

    store, other = kv.create("dist_sync"), kv.create("dist_sync")
    weight = np.zeros((2000, 1000), np.float32)           # cut over both servers
    store.init(["w", "b"], [weight, np.zeros(3, np.float32)])
    store.set_optimizer("sgd", learning_rate=0.5)
    for _ in range(4):
        store.pushpull("w", np.full_like(weight, store.rank + 1), out=weight)
    assert (weight == -6.0).all(), weight                 # 4 rounds of 0.5 * (1 + 2)
    total = np.array([store.rank + 1])
    other.init("total", total)
    other.pushpull("total", total)
    print("total", total[0], store.num_workers, store.num_dead_nodes(), flush=True)

    every = kv.create("dist_async")                       # where every push is an update
    few = np.zeros(10, np.float32)
    every.init("w", few)
    try:
        every.push("w", few)
    except kv.UsageError as error:
        assert "set_optimizer" in str(error)
    else:
        raise SystemExit("a push without an optimizer was taken")
    try:
        every.set_optimizer("sgd", learning_rate=-1)
    except kv.ServerError as error:
        print("refused:", error, flush=True)
    every.barrier()
    every.set_optimizer("sgd", learning_rate=1.0)
    for _ in range(50):
        every.push("w", np.ones_like(few)).wait()
    every.barrier()
    every.pull("w", out=few)
    assert (few == -100).all(), few
    every.set_optimizer("sgd", learning_rate=1.0, momentum=0.9)
"""
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
def test_rounds_are_right_a_worker_that_is_busy_in_c_is_not_lost_and_one_that_is_stopped_is(tmp_path: Path) -> None:
    with job(tmp_path, ROUNDS + BUSY + STOPS, **LIMITS) as running:
        running.until(lambda: running.output.count("is done") == 2, "both workers")
        assert running.output.count("total 3 2 0") == 2
        assert running.output.count("Invalid learning rate: -1") == 2
        assert running.output.count("UserWarning: sgd has momentum 0.9 in a 'dist_async' store of 2 workers") == 1
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


LINKS = """
    import os, socket
    import numpy as np
    import kvstore as kv

    store = kv.create("dist_sync")
    weight = np.zeros((2000, 1000), np.float32)
    store.init("w", weight)
    store.pushpull("w", np.full_like(weight, store.rank + 1), out=weight)
    assert (weight == 3.0).all(), weight
    store.barrier()
    names = set()
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm") as comm:
            names.add(comm.read().strip())
    print("ZeroMQ" if any(name.startswith("ZMQ") for name in names) else "sockets", flush=True)
    store.barrier()
    if store.rank == 1:
        raise SystemExit(7)
    store.pushpull("w", weight, out=weight)
"""


@pytest.mark.release
def test_a_jobs_links_are_zeromqs_where_that_is_set(tmp_path: Path) -> None:
    """ZeroMQ's threads have names, so one can see what a process uses. A death is told over its links, too."""
    with job(tmp_path, LINKS, servers=1, KVSTORE_TRANSPORT="zeromq", KVSTORE_SHM="false") as running:
        assert running.wait() == 7, running.output
        assert "worker 1" in running.output.split("NodeLost:")[1], "the survivor does not name the one that left"
        assert not running.members()
    assert running.output.count("ZeroMQ") == 2, running.output


@pytest.mark.release
def test_a_forked_child_is_refused_and_its_parent_goes_on(tmp_path: Path) -> None:
    """Worker 0 shares no memory, because that can be turned off."""
    script = """
        import os
        import warnings
        from pathlib import Path
        if os.environ["DMLC_TASK_ID"] == "0":
            os.environ["KVSTORE_SHM"] = "0"
        import numpy as np
        import kvstore as kv

        warnings.simplefilter("ignore", DeprecationWarning)   # of Python 3.12: a fork beside threads
        store = kv.create("dist_sync")
        weight = np.zeros(3, np.float32)
        store.init("w", weight)
        ticket = store.pushpull("w", np.ones(3, np.float32), out=weight, wait=False)
        store.barrier()                                       # or the fork might come before all have their answers
        shared = list(Path("/dev/shm").glob(f"kvstore-{os.getuid()}-*-{os.getpid()}-*"))
        assert bool(shared) == (SHARES and store.rank == 1), shared
        child = os.fork()
        if not child:
            calls = [
                lambda: store.pushpull("w", np.ones(3, np.float32), out=weight),
                lambda: store.push("w", weight),
                lambda: store.pull("w", out=weight),
                lambda: store.init("v", weight),
                store.barrier,
                lambda: kv.create("dist_sync"),
            ]
            for call in calls:
                try:
                    call()
                except kv.ConfigError as error:
                    assert "forked from a member" in str(error)
                else:
                    os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        ticket.wait()
        for value in (5, 6, 7):
            store.pushpull("w", np.full(3, value, np.float32), out=weight)
            assert (weight == 2 * value).all(), weight
        """
    with job(tmp_path, script.replace("SHARES", repr(available())), servers=1) as running:
        assert running.wait() == 0, running.output


@pytest.mark.release
def test_an_error_nobody_waited_for_fails_the_job(tmp_path: Path) -> None:
    script = """
        import numpy as np
        import kvstore as kv

        store = kv.create("dist_sync")
        weight = np.ones(3, np.float32)
        store.init("w", weight)
        store.set_optimizer("sgd", learning_rate=0.1)
        store.set_learning_rate(0.1 * (store.rank + 1))
        store.push("w", weight)                          # and the script ends
        """
    with job(tmp_path, script, servers=1) as running:
        assert running.wait() != 0
        assert "workers disagree on the learning rate" in running.output


@pytest.mark.release
@pytest.mark.usefixtures("none_ignored")
def test_a_worker_that_is_interrupted_while_it_leaves_has_not_left_in_order(tmp_path: Path) -> None:
    """Its last pushes may not have arrived: others hear of it at once, and its exit code says so."""
    script = """
        import signal
        import numpy as np
        import kvstore as kv
        from kvstore.member.shared_session import shared

        store = kv.create("dist_sync")
        weight = np.zeros(4, np.float32)
        store.init("w", weight)
        store.barrier()
        if store.rank == 0:
            print("the last words", end="")
            shared(None).flushes.append(lambda timeout: signal.raise_signal(signal.SIGINT))
        else:
            store.pushpull("w", weight, out=weight)
        """
    with job(tmp_path, script, servers=1, KVSTORE_TIMEOUT_S="100", PYTHONUNBUFFERED="") as running:
        assert running.wait() == 130, running.output
    assert "[worker 0] the last words\n" in running.output
    assert "NodeLost: worker 0 failed: KeyboardInterrupt" in running.output
    assert "launch.py: worker 0 was killed by SIGINT" in running.output
