"""Training over ssh, with the real servers, on hosts of their own."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from cluster.hosts import Hosts
from sites import Site
from threaded import ThreadedJob
from waiting import until

from kvstore.client import DistStore

SHARED = """
import os, pathlib
mine = f"kvstore-{os.getuid()}-{os.environ['KVSTORE_JOB']}-"
shared = {path.name.rpartition(".")[0] for path in pathlib.Path("/dev/shm").glob(f"{mine}*")}
print("memory of", len(shared), "at", os.environ["DMLC_NODE_HOST"], "of", os.environ["DMLC_PS_ROOT_URI"], flush=True)
"""

# Whole trainings, while other tests run beside them.
pytestmark = pytest.mark.timeout(300)


def over(site: Site, *lines: str) -> tuple[str, ...]:
    path = site.directory / "hosts"
    path.write_text("\n".join(lines) + "\n")
    return ("-H", str(path))


ENDLESS = """
import numpy as np
import kvstore as kv

store = kv.create("dist_sync")
store.init("w", np.zeros(1000, np.float32))
for step in range(1_000_000):
    store.pushpull("w", np.ones(1000, np.float32), out=np.zeros(1000, np.float32))
    if step == 3:
        print("trains", flush=True)
"""


@pytest.mark.release
def test_an_aggregator_that_is_killed_ends_the_job_by_name(over_ssh: Site, hosts: Hosts) -> None:
    (over_ssh.directory / "endless.py").write_text(ENDLESS)
    words = over(over_ssh, *(f"{address} slots=2" for address in hosts.addresses[:2]))
    run = over_ssh.launch(*words, "-n", "4", "-s", "2", "python", "endless.py", real=True)
    until(lambda: run.out.count("trains") == 4, "the workers to train", over=run.over)
    pid, host = over_ssh.member("aggregator", 1, "servers")
    assert host == 1
    os.kill(pid, signal.SIGKILL)
    assert run.wait(60) == 128 + signal.SIGKILL, run.err
    assert run.all_err.splitlines()[-1].startswith(
        f"launch.py: aggregator 1 on {hosts.addresses[1]} was killed by SIGKILL"
    )
    assert over_ssh.relics() == []


# All values are small integers, so sums have the same bits in any order.
COUNTED = f"""
import os, time
import numpy as np
import kvstore as kv

SHARED = {SHARED!r}
STEPS, SIZE = 50, 50_000
summed, free, coded, lent = map(kv.create, ("dist_sync", "dist_async", "dist_sync", "dist_device_sync"))
ones, out = np.ones(SIZE, np.float32), np.zeros(SIZE, np.float32)
weight = np.arange(SIZE, dtype=np.float32)
summed.set_optimizer("sgd", learning_rate=0.125, momentum=0.5)
free.set_optimizer("sgd", learning_rate=1.0)
coded.set_gradient_compression(dict(type="fp16", pull=dict(type="fp16")))
for store in (summed, free, coded, lent):
    store.init("w", weight if store is summed else np.zeros(SIZE, np.float32))
for step in range(1, STEPS + 1):
    summed.pushpull("w", ones * (step % 3 - 1) * (summed.rank + 1), out=weight)
    free.push("w", ones)
    for store in (coded, lent):
        store.pushpull("w", ones, out=out)
        assert (out == 4).all(), (step, np.unique(out))
    if step == 5:
        assert lent.statistics().bytes_lent, "the aggregator reads what is pushed"
        lent.barrier()
        exec(SHARED)
    while step == 40 and not os.path.exists("killed"):  # as it is by then, unless the machine is very busy
        time.sleep(0.01)
    time.sleep(0.01)
free.barrier()
free.pull("w", out=out)
assert (out == -4 * STEPS).all(), np.unique(out)
np.save(f"weights-{{summed.rank}}", weight)
print("exact", flush=True)
"""


def counted_here() -> np.ndarray:
    def train(store: DistStore) -> np.ndarray:
        weight = np.arange(50_000, dtype=np.float32)
        store.set_optimizer("sgd", learning_rate=0.125, momentum=0.5)
        store.init("w", weight)
        for step in range(1, 51):
            store.pushpull("w", np.full_like(weight, (step % 3 - 1) * (store.rank + 1)), out=weight)
        return weight

    with ThreadedJob(4, 2) as job:
        return job.run(train)[0]


def test_without_its_aggregator_a_host_goes_on_and_everything_counts_once(over_ssh: Site, hosts: Hosts) -> None:
    """Two workers, a server and an aggregator on each host, which share its memory; hosts are reached by IPv6."""
    (over_ssh.directory / "counted.py").write_text(COUNTED)
    words = over(over_ssh, f"[{hosts.addresses6[0]}] slots=2", f"root@[{hosts.addresses6[1]}]:22 slots=2")
    env = ("--env-server", "KVSTORE_DEVICE_SUM:host", "--env-worker", "KVSTORE_DEVICE_SUM:host")
    run = over_ssh.launch(
        *(*words, *env, "-n", "4", "-s", "2", "--min-workers", "1", "python", "counted.py"), real=True
    )
    until(lambda: run.out.count("memory of") == 4, "the workers to train", over=run.over)
    for i in range(2):
        assert run.out.count(f"memory of 4 at {hosts.addresses6[i]} of {hosts.outside6}\n") == 2
    pid, _ = over_ssh.member("aggregator", 1, "servers")
    os.kill(pid, signal.SIGKILL)
    (over_ssh.directory / "killed").touch()
    assert run.wait(120) == 0, run.err
    assert run.out.count("exact") == 4
    assert " was killed by SIGKILL; the workers of its host send to the servers themselves from now on" in run.all_err
    undisturbed = counted_here()
    for rank in range(4):
        assert np.array_equal(np.load(over_ssh.directory / f"weights-{rank}.npy"), undisturbed), rank


MISTAKE = """
import numpy as np
import kvstore as kv

store = kv.create("dist_sync")
weight = np.ones((4, 3), np.float32)
store.init("w", weight)
for step in range(9):
    gradient = np.ones((3, 4) if store.rank == step == 1 else (4, 3), np.float32)
    store.pushpull("w", gradient, out=weight)
"""


@pytest.mark.release
def test_a_mistake_in_one_worker_is_told_once(over_ssh: Site, hosts: Hosts) -> None:
    """Agents pass on why processes end."""
    (over_ssh.directory / "mistake.py").write_text(MISTAKE)
    words = over(over_ssh, *hosts.addresses[1:3])
    run = over_ssh.launch(*words, "-n", "2", "-s", "2", "python", "mistake.py", real=True)
    assert run.wait(150) == 1, run.err
    own = [line for line in run.all_err.splitlines() if "is reached at" not in line]
    assert own[:3] == [
        "launch.py: starting 2 workers, 2 servers on 2 hosts",
        f"launch.py: worker 0 on {hosts.addresses[1]} ended because worker 1 on {hosts.addresses[2]} has failed "
        "(at mistake.py:10)",
        f"launch.py: worker 1 on {hosts.addresses[2]} exited with code 1:",
    ]
    assert len(own) <= 12
    assert own[-2:] == [
        '[worker 1]     store.pushpull("w", gradient, out=weight)',
        "[worker 1] kvstore.errors.Mismatch: key 'w' is float32[4, 3], but this call has float32[3, 4]",
    ]


BRIEF = """
import time
import numpy as np
import kvstore as kv

store = kv.create("dist_sync")
store.init("w", np.zeros(1000, np.float32))
out = np.zeros(1000, np.float32)
for step in range(1000):
    store.pushpull("w", np.ones(1000, np.float32), out=out)
    if step == 3:
        print("trains", flush=True)
    if step % 100 == 99:
        store.barrier()
    time.sleep(0.002)
assert (out == 2).all()
"""


@pytest.mark.faults
def test_a_scheduler_that_is_killed_is_started_again_beside_launch_py(over_ssh: Site, hosts: Hosts) -> None:
    """The links, which are encrypted, are made anew with the same keys."""
    (over_ssh.directory / "brief.py").write_text(BRIEF)
    words = over(over_ssh, *hosts.addresses[1:3])
    run = over_ssh.launch(*words, "-n", "2", "-s", "1", "--restarts", "2", "python", "brief.py", real=True)
    until(lambda: run.out.count("trains") == 2, "the workers to train", over=run.over)
    os.kill(run.pid_of("servers"), signal.SIGKILL)
    assert run.wait(60) == 0, run.all_err
    assert "[scheduler] the scheduler was lost (SIGKILL); its successor took over in " in run.all_err
    assert over_ssh.relics() == []
