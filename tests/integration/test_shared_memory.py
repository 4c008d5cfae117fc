"""Real jobs that share memory, and what they leave in /dev/shm, however they end."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

import called
import pytest
from jobs import Job, job
from proc import state
from waiting import PROMPT, until

import launcher
from kvstore.transport.shm.presence import available

PIDFD_GETFD = 438  # the number of that system call, everywhere
pytestmark = pytest.mark.skipif(not available(), reason="memory cannot be shared here")

TRAIN = """
    import numpy as np
    import kvstore as kv

    store = kv.create("dist_sync")
    weight = np.zeros((1000, 1100), np.float32)
    store.init("w", weight)
    for step in range({steps}):
        store.pushpull("w", np.ones_like(weight), out=weight)
        assert (weight == store.num_workers).all()
        if step == 5:
            print("training", flush=True)
"""
FOREVER = TRAIN.format(steps="10**9")
# What a script ends with that must not end before it has been looked at.
SEEN = """
    import pathlib, time
    while not pathlib.Path({seen!r}).exists():
        time.sleep(0.01)
"""


def mark(running: Job) -> str:
    for entry in running.members():
        for item in Path(f"/proc/{entry}/environ").read_text(errors="replace").split("\0"):
            if item.startswith("KVSTORE_JOB="):
                return item.partition("=")[2]
    raise AssertionError("the job has no processes")


def files(name: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"kvstore-{os.getuid()}-{name}-*"))


def training(running: Job, workers: int = 2, servers: int = 1) -> str:
    running.until(lambda: running.output.count("training") == workers, "training")
    name = mark(running)
    owners = {path.name.rpartition(".")[0] for path in files(name)}
    assert len(owners) == workers + servers, "all of them share memory"
    return name


@pytest.mark.release
def test_a_job_that_ends_leaves_nothing_over_tcp_either(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    script = TRAIN.format(steps=200) + SEEN.format(seen=str(seen))
    with job(tmp_path, script, servers=1, KVSTORE_TRANSPORT="tcp") as running:
        name = training(running)
        seen.touch()
        assert running.wait() == 0, running.output
        assert files(name) == []
    assert "shared memory" not in running.output


@pytest.mark.parametrize(
    ("role", "rank"),
    [
        pytest.param("worker", 1, marks=pytest.mark.release),
        pytest.param("server", 0, marks=pytest.mark.release),
        pytest.param("scheduler", 0, marks=pytest.mark.release),
    ],
)
def test_sigkill_of_a_member_ends_the_job_by_name_and_leaves_nothing(tmp_path: Path, role: str, rank: int) -> None:
    with job(tmp_path, FOREVER, servers=1) as running:
        name = training(running)
        os.kill(running.members(role, rank)[0], signal.SIGKILL)
        assert running.wait(PROMPT) == 137
        member = role if role == "scheduler" else f"{role} {rank}"
        assert f"launch.py: {member} was killed by SIGKILL" in running.output
        survivors = running.output.count(f"NodeLost: {member} was killed by SIGKILL")
        if role != "scheduler":  # its own death shows by silence, for which launch.py does not wait
            assert survivors == (1 if role == "worker" else 2), running.output
        assert not running.members()
        assert files(name) == []


@pytest.mark.release
def test_sigkill_of_the_launcher_leaves_nothing(tmp_path: Path) -> None:
    with job(tmp_path, FOREVER, servers=1) as running:
        name = training(running)
        running.process.kill()
        running.process.wait()
        until(lambda: not running.members(), "the processes to go")
        until(lambda: not files(name), "the memory to go")


def test_what_a_job_leaves_that_was_killed_as_a_whole_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with job(tmp_path, FOREVER, workers=1, servers=1) as running:
        name = training(running, workers=1)
        members = running.members()
        whole = [running.process.pid, *keepers(running.process.pid), *members]
        for pid in whole:  # none may see another's end, and clear away what is left
            stop(pid)
        locks = [lock for pid in members for lock in shared_locks(pid, name)]
        for pid in whole:
            os.kill(pid, signal.SIGKILL)
        running.process.wait()
        until(lambda: not running.members())
        assert files(name), "nobody was left to remove them"
    for lock in locks:
        os.close(lock)
    called.in_haste(monkeypatch.setattr)
    assert launcher.run(called.rank) == [0]
    assert files(name) == []


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state(pid) == "T", "a process to stop")


def shared_locks(pid: int, name: str) -> list[int]:
    """The locks on a process's own shared memory, held here as well: no other test's job takes it for dead."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        if str(entry.readlink()).startswith(f"/dev/shm/kvstore-{os.getuid()}-{name}-{pid}-"):
            pidfd = os.pidfd_open(pid)
            found.append(ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, pidfd, int(entry.name), 0))
            os.close(pidfd)
            assert found[-1] >= 0, os.strerror(ctypes.get_errno())
    return found


def keepers(launcher: int) -> list[int]:
    found = []
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if b"keeper.py" in Path(f"/proc/{child}/cmdline").read_bytes():
            found.append(int(child))
    assert len(found) == 1
    return found


WHOLE = """
    import torch
    import kvstore as kv

    store = kv.create("dist_async", bigarray_bound=2**40)
    store.set_optimizer("sgd", learning_rate=1.0)
    gradient, weight, view = store.empty(300_000).fill_(-1), torch.zeros(300_000), torch.zeros(300_000)
    store.init("w", weight)
    store.barrier()
    for step in range(60):
        if step == 5:
            print("training", flush=True)
        store.push("w", gradient).wait()
        store.pull("w", out=weight)
        assert weight.min() == weight.max() >= step + 1, "a value of which a part belongs to another update"
        store.pull("w", out=view, copy=False)
        before = view[0].item()
        store.pushpull("w", gradient, out=weight)
        assert view.min() == view.max() == before, "a value that was read changed"
    store.barrier()
    store.pull("w", out=weight)
    assert (weight == 240).all()
"""


@pytest.mark.release
def test_values_are_whole_while_others_update_and_a_job_that_ends_leaves_nothing(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    with job(tmp_path, WHOLE + SEEN.format(seen=str(seen)), servers=1) as running:
        name = training(running)
        seen.touch()
        assert running.wait() == 0, running.output
        assert files(name) == []
    assert "shared memory" not in running.output
