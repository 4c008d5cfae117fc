"""Whole jobs, with real processes, real sockets and real deaths."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import job

TRAIN = """
    import sys
    import numpy as np
    import kvstore as kv

    store = kv.create("dist_sync")
    weight = np.zeros((300, 400), np.float32)
    store.set_optimizer("sgd", learning_rate=0.1)
    store.init("w", weight)
    steps = 0
    while True:
        store.pushpull("w", np.ones_like(weight), out=weight)
        steps += 1
        if steps == 5:
            print("training", flush=True)
"""


def test_rounds_are_right_and_everything_ends_soon_after_the_workers(tmp_path: Path) -> None:
    script = """
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
        """
    with job(tmp_path, script) as running:
        running.until(lambda: bool(running.members("worker")))
        while running.members("worker"):
            time.sleep(0.02)
        workers_gone = time.monotonic()
        assert running.wait() == 0, running.output
        assert running.ended - workers_gone < 2.5  # the 2 s, and what looking costs
        assert not running.members()
    assert running.output.count("total 3 2 0") == 2


def test_a_job_over_tcp(tmp_path: Path) -> None:
    script = """
        import numpy as np
        import kvstore as kv

        with kv.create("dist_sync") as store:
            value = np.ones(2_000_000, np.float32)
            store.init("v", value)
            store.pushpull("v", value)
            assert (value == 2).all()
        """
    with job(tmp_path, script, KVSTORE_TRANSPORT="tcp") as running:
        assert running.wait() == 0, running.output


def test_every_async_push_is_an_update(tmp_path: Path) -> None:
    script = """
        import numpy as np
        import kvstore as kv

        store = kv.create("dist_async")
        weight = np.zeros(10, np.float32)
        store.init("w", weight)
        try:
            store.push("w", weight)
        except kv.UsageError as error:
            assert "set_optimizer" in str(error)
        else:
            raise SystemExit("a push without an optimizer was taken")
        store.barrier()
        store.set_optimizer("sgd", learning_rate=1.0)
        for _ in range(50):
            store.push("w", np.ones_like(weight)).wait()
        store.barrier()
        store.pull("w", out=weight)
        assert (weight == -100).all(), weight
        """
    with job(tmp_path, script) as running:
        assert running.wait() == 0, running.output


def test_a_worker_that_exits_with_7(tmp_path: Path) -> None:
    with job(tmp_path, TRAIN + "            if store.rank == 1: sys.exit(7)\n") as running:
        assert running.wait() == 7
        assert "launch.py: worker 1 exited with code 7" in running.output
        assert "worker 1" in running.output.split("NodeLost:")[1], "the survivor does not name the one that left"
        assert not running.members()


@pytest.mark.parametrize(("role", "rank"), [("worker", 1), ("server", 0), ("scheduler", 0)])
def test_sigkill_of_a_member_ends_the_job_by_name(tmp_path: Path, role: str, rank: int) -> None:
    with job(tmp_path, TRAIN) as running:
        running.until(lambda: running.output.count("training") == 2)
        os.kill(running.members(role, rank)[0], signal.SIGKILL)
        killed = time.monotonic()
        assert running.wait() == 137
        assert running.ended - killed < 5.0
        name = role if role == "scheduler" else f"{role} {rank}"
        assert f"launch.py: {name} was killed by SIGKILL" in running.output
        survivors = running.output.count(f"NodeLost: {name} was killed by SIGKILL")
        if role != "scheduler":  # its own death shows by silence, for which launch.py does not wait
            assert survivors == (1 if role == "worker" else 2), running.output
        assert not running.members()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launcher_ends_everything(tmp_path: Path, number: int, code: int) -> None:
    with job(tmp_path, TRAIN) as running:
        running.until(running.said("training"))
        running.process.send_signal(number)
        sent = time.monotonic()
        assert running.wait() == code
        assert running.ended - sent < 5.0
        assert not running.members()


def test_sigkill_of_the_launcher_leaves_nothing(tmp_path: Path) -> None:
    with job(tmp_path, TRAIN) as running:
        running.until(running.said("training"))
        running.process.kill()
        running.process.wait()
        deadline = time.monotonic() + 5.0
        while running.members():
            assert time.monotonic() < deadline, "processes are left"
            time.sleep(0.02)


def test_a_member_that_falls_silent_is_lost_by_name(tmp_path: Path) -> None:
    with job(tmp_path, TRAIN) as running:
        running.until(lambda: running.output.count("training") == 2)
        stopped = running.members("worker", 1)[0]
        os.kill(stopped, signal.SIGSTOP)
        assert running.wait() != 0
        assert "NodeLost: worker 1 is lost: it has been silent for" in running.output
        assert not running.members()


def test_an_optimizer_that_throws_raises_in_the_worker(tmp_path: Path) -> None:
    script = """
        import kvstore as kv

        store = kv.create("dist_sync")
        try:
            store.set_optimizer("sgd", learning_rate=-1)
        except kv.ServerError as error:
            print("refused:", error, flush=True)
        """
    with job(tmp_path, script) as running:
        assert running.wait() == 0, running.output
    assert running.output.count("Invalid learning rate: -1") == 2


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
    with job(tmp_path, script) as running:
        assert running.wait() != 0
        assert "workers disagree on the learning rate" in running.output


def test_a_worker_that_never_pushes_is_named_at_the_deadline(tmp_path: Path) -> None:
    script = """
        import time
        import numpy as np
        import kvstore as kv

        store = kv.create("dist_sync")
        weight = np.ones(3, np.float32)
        store.init(["w", "v"], [weight, weight])
        if store.rank == 0:
            started = time.monotonic()
            try:
                store.pushpull(["w", "v"], [weight, weight])
            except kv.DeadlineExceeded as error:
                print("late:", error, flush=True)
                assert time.monotonic() - started < 6
            else:
                raise SystemExit("nothing was missing")
        try:
            store.barrier() if store.rank else store.push("w", weight).wait(0.1)
        except kv.DeadlineExceeded as error:
            print("late:", error, flush=True)
        """
    with job(tmp_path, script, KVSTORE_TIMEOUT_S="2") as running:
        running.wait()
    assert "pushpull of 'w', 'v' is not done after 2 s" in running.output
    assert "worker 1, whose push 1 of" in running.output
    assert "barrier is not done after 2 s: the scheduler waits at the barrier for worker 0" in running.output


def test_a_worker_that_does_not_come_is_named(tmp_path: Path) -> None:
    script = """
        import os, time
        import kvstore as kv

        if os.environ["DMLC_TASK_ID"] == "1":
            time.sleep(30)
        kv.create("dist_sync")
        """
    with job(tmp_path, script, servers=1, KVSTORE_TIMEOUT_S="4") as running:
        assert running.wait() == 1
    assert "the scheduler waits for worker 1 to join" in running.output


def test_outside_a_job_a_dist_store_says_what_to_do() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import kvstore as kv; kv.create('dist_sync')"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "launch.py -n 2 -s 2" in done.stderr


@pytest.mark.parametrize("module", ["kvstore", "launcher.launch", "servers.__main__"])
def test_torch_is_not_imported_before_it_is_needed(module: str) -> None:
    check = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0
