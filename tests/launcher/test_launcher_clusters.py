"""What holds on every kind of cluster: the real ssh, Open MPI, MPICH, Slurm and Grid Engine, over real hosts."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.mpi import mpi
from sites import Site, until

SPREAD = ("--cluster-option=--nodes=2", "--cluster-option=--ntasks-per-node=3")
KINDS = ("ssh", "openmpi", "mpich", "slurm", "sge")


@pytest.fixture(params=KINDS)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    kind = request.param
    if kind in ("slurm", "sge"):
        there = request.getfixturevalue(kind)
        words: tuple[str, ...] = ("--launcher", kind, *(SPREAD if kind == "slurm" else ()))
        made = Site(kind, words, there.env, there.hosts, tmp_path)
        if kind == "sge":
            made.enter = lambda argv: there.enter(argv, tmp_path)
    else:
        hosts = request.getfixturevalue("hosts")
        words = ("--launcher", "ssh" if kind == "ssh" else "mpi", "-H", str(hosts.hostfile()))
        made = Site(kind, words, hosts.launcher_env if kind == "ssh" else mpi(kind, hosts).env, hosts, tmp_path)
    yield made
    made.close()


def test_every_process_runs_and_says_who_it_is(site: Site) -> None:
    code = "import os, socket; print(os.environ['DMLC_ROLE'], os.environ['DMLC_TASK_ID'], socket.gethostname())"
    run = site.launch("-n", "4", "-s", "2", "python", "-c", code)
    assert run.wait() == 0, run.err
    lines = [line.split() for line in run.lines]
    assert [line[:4] for line in lines] == [["[worker", f"{rank}]", "worker", str(rank)] for rank in range(4)]
    assert {line[4] for line in lines} <= set(site.hosts.names)
    assert len({line[4] for line in lines}) > 1


def test_a_worker_that_fails_is_named_with_its_host(site: Site) -> None:
    code = (
        "import os, time\nif os.environ['DMLC_TASK_ID'] == '1': print('soon', flush=True); os._exit(7)\ntime.sleep(999)"
    )
    run = site.launch("-n", "4", "-s", "2", "python", "-c", code)
    until(lambda: "soon" in run.out, "the worker to fail", 40, run)
    began = time.monotonic()
    assert run.wait() == 7, run.err
    assert time.monotonic() - began < 5
    assert "worker 1 on " in run.err
    assert "exited with code 7" in run.err
    until(lambda: not site.left("sleep(999)"), "the others to be gone")


def test_ctrl_c(site: Site) -> None:
    run = site.launch("-n", "4", "-s", "2", "python", "-c", "import time; print('here', flush=True); time.sleep(1234)")
    until(lambda: run.out.count("here") == 4, "the workers to run", 40, run)
    run.send(signal.SIGINT)
    assert run.wait() == 130
    until(lambda: not site.left("sleep(1234)"), "the workers to be gone")
