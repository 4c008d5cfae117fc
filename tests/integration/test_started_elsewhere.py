"""Jobs that torchrun and mpirun start, without launch.py: they work, and however they end, nothing of them is left."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from cluster.hosts import ROOT, Hosts
from waiting import LONG, PROMPT, until

SCRIPT = """
    import contextlib, os, signal, sys
    import numpy as np
    import kvstore as kv

    store = kv.create("dist_sync")
    again = kv.create("dist_async")
    assert (store.rank, store.num_workers) == (again.rank, again.num_workers)
    store.init("w", np.zeros(4, "float32"))
    out = np.zeros(4, "float32")
    store.pushpull("w", np.full(4, store.rank + 1, "float32"), out=out)
    print(f"rank {store.rank} of {store.num_workers} has {out[0]:g}", flush=True)
    with contextlib.suppress(ChildProcessError):
        while True:  # a script may wait for all of its children, and there is none of ours
            os.wait()
    store.barrier()
    match sys.argv[1:], store.rank:
        case ["kill"], 0:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["raise"], 1:
            raise ValueError("out of coffee")
        case ["kill an aggregator"], _:
            for _ in range(1_000_000):
                store.pushpull("w", out, out=out)
    if sys.argv[1:]:
        store.pull("w", out=out)
        store.barrier()
"""
# torchrun itself takes torch to start, before its workers do: three and two of them, one after the other.
LIMIT = 3 * LONG
pytestmark = [pytest.mark.long, pytest.mark.timeout(LIMIT + 2 * PROMPT + 10)]

BOTH = {"rank 0 of 2 has 3", "rank 1 of 2 has 3"}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
OPENMPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return str(path)


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment whose processes can be found, and whose temporary files are in a directory of their own."""
    own = tmp_path / "tmp"
    own.mkdir()
    foreign = ("OMPI_", "PMI", "HYDRA_", "SLURM_", "TORCHELASTIC_", "MASTER_")
    made = {name: value for name, value in os.environ.items() if not name.startswith(foreign)} | OPENMPI
    made |= {"TEST_MARK": f"{os.getpid()}-{time.monotonic_ns()}", "TMPDIR": str(own), "PYTHONPATH": str(ROOT)}
    made |= {"OMP_NUM_THREADS": "1", "KVSTORE_HEARTBEAT_TIMEOUT_S": "300"}  # silence is not what ends these jobs
    yield made
    for pid in living(made):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def run(words: Sequence[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=LIMIT)


def said(text: str) -> set[str]:
    """What the workers printed; an mpirun may put the end of one's line behind the start of another's."""
    return set(re.findall(r"rank \d of \d has \d+", text))


def living(env: dict[str, str]) -> dict[int, str]:
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"TEST_MARK={env['TEST_MARK']}".encode() in (process / "environ").read_bytes():
                found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
    return found


def nothing_left(env: dict[str, str]) -> None:
    until(lambda: not living(env), "the last process to end", PROMPT)
    until(lambda: not list(Path(env["TMPDIR"]).glob("kvstore-*")), "the job's directory to go", PROMPT)


def test_torchrun_and_a_worker_that_fails(script: str, env: dict[str, str]) -> None:
    done = run([*TORCHRUN, "--standalone", "--nproc-per-node=2", script, "raise"], env)
    assert done.returncode == 1, done.stderr
    assert said(done.stdout) == BOTH
    ours = [line for line in done.stderr.splitlines() if "out of coffee" in line]
    assert ours[1] == "ValueError: out of coffee"
    assert ours.count("the job has failed: worker 1 failed: ValueError: out of coffee") == 1
    assert "server 0" not in done.stderr
    nothing_left(env)


@pytest.mark.release
@pytest.mark.parametrize(("kind", "how"), [("openmpi", ""), pytest.param("mpich", "kill", marks=pytest.mark.faults)])
def test_mpirun(kind: str, how: str, script: str, env: dict[str, str]) -> None:
    mpirun = shutil.which(f"mpirun.{kind}")
    if mpirun is None:
        pytest.skip(f"mpirun.{kind} is not installed")
    # Through a shell, as a user's script might be: the ranks' parents are not mpirun then.
    done = run([mpirun, "-n", "2", "sh", "-c", f"{sys.executable} {script} {how}; exit $?"], env)
    assert said(done.stdout) == BOTH, done.stderr
    assert (done.returncode == 0) == (how == ""), done.stderr
    nothing_left(env)


def aggregators(env: dict[str, str]) -> list[int]:
    """The processes of a job that are aggregators, in the order of their ranks."""
    ranks = {}
    for pid in living(env):
        with contextlib.suppress(OSError):
            variables = dict(
                pair.split("=", 1)
                for pair in Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
                if "=" in pair
            )
            if variables.get("DMLC_ROLE") == "aggregator":
                ranks[int(variables["DMLC_TASK_ID"])] = pid
    return [ranks[rank] for rank in sorted(ranks)]


@pytest.mark.faults
def test_torchrun_on_two_hosts_with_two_workers_each(
    hosts: Hosts, script: str, env: dict[str, str], tmp_path: Path
) -> None:
    """An aggregator that dies is seen to by the same supervisor as servers, and over ssh by a test of its own."""
    env |= {"KVSTORE_JOB_SECRET": "0123456789abcdef" * 2}
    options = ["--nnodes=2", f"--master-addr={hosts.addresses[0]}", "--master-port=29511", "--nproc-per-node=2"]
    with contextlib.ExitStack() as stack:
        running = []
        for number in range(2):
            log = stack.enter_context((tmp_path / f"log{number}").open("w"))
            words = hosts.enter(number, [*TORCHRUN, *options, f"--node-rank={number}", script])
            running.append(subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
            stack.callback(running[-1].kill)
        logs = [tmp_path / f"log{number}" for number in range(2)]
        until(lambda: len(aggregators(env)) == 2, "aggregators", over=lambda: str(running[0].poll() or "") or None)
        codes = [process.wait(LIMIT) for process in running]
    texts = [log.read_text() for log in logs]
    assert codes == [0, 0], texts
    assert said("".join(texts)) == {f"rank {rank} of 4 has 10" for rank in range(4)}
    assert not any("not encrypted" in text for text in texts)
    nothing_left(env)
