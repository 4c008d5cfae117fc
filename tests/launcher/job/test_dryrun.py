"""What --dry-run shows of each kind: everything but the values of the user's variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.job import dryrun
from launcher.job.description import RESERVED, Cluster, Job
from launcher.kinds.registry import KINDS, find
from launcher.launch import main

VERSIONS = {"openmpi": "mpirun (Open MPI) 4.1.4", "mpich": "HYDRA build details:"}
NAMES = st.from_regex(r"[A-Z_]{1,12}|PYTHONPATH|OMP_NUM_THREADS|KVSTORE_TIMEOUT_S", fullmatch=True).filter(
    lambda name: name not in RESERVED and name != "PATH"
)
# Long enough not to stand there by chance.
VALUES = (
    st.binary(min_size=1, max_size=9).filter(lambda value: 0 not in value).map(lambda v: os.fsdecode(b"hunter2" + v))
)
VARIABLES = st.dictionaries(NAMES, VALUES, max_size=3)


@pytest.fixture(params=VERSIONS)
def mpirun(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    fake = tmp_path / "bin" / "mpirun"
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/sh\necho '{VERSIONS[request.param]}'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(fake.parent), prepend=os.pathsep)
    return str(request.param)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a hostfile; nothing may come to be there."""
    directory = tmp_path / "here"
    directory.mkdir()
    (directory / "hosts").write_text("node1 slots=1\nnode2\nlocalhost\n")
    monkeypatch.chdir(directory)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    yield directory
    assert [file.name for file in directory.iterdir()] == ["hosts"]


def cluster(kind: str) -> Cluster:
    if kind == "ssh":
        return Cluster(hostfile="hosts", sync_dst_dir="/job")
    if kind == "mpi":
        return Cluster(hostfile="hosts")
    return Cluster(image="me/mine") if kind == "kubernetes" else Cluster()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mpi"])
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(VARIABLES, VARIABLES, VARIABLES)
def test_no_value_is_shown(
    kind: str, here: Path, server: dict[str, str], worker: dict[str, str], environ: dict[str, str]
) -> None:
    job = Job(3, 2, ("python train.py --lr 0.1",), server, worker, tuple(environ), cluster(kind))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        shown = find(kind, job).dry_run(job)
    for name, value in [*server.items(), *worker.items(), *environ.items()]:
        assert value not in shown
        assert kind in ("local", "slurm") or name in shown
    assert "hunter2" not in shown
    assert "train.py" in shown


def test_neither_does_mpi(here: Path, mpirun: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "hunter2")
    job = Job(2, 1, ("x",), {"S": "hunter2"}, {"W": "hunter2"}, ("TOKEN",), cluster("mpi"))
    shown = find("mpi", job).dry_run(job)
    assert "hunter2" not in shown
    assert "KVSTORE_ENLIST=..." in shown
    assert ("--hostfile '(hosts)'" in shown) == (mpirun == "openmpi")
    assert ("-f '(hosts)'" in shown) == (mpirun == "mpich")
    assert f"#   node1{' slots=1' if mpirun == 'openmpi' else ':1'}" in shown.splitlines()
    assert "-n 3" in shown


@pytest.mark.parametrize("kind", ["slurm"])
def test_inside_an_allocation_nothing_is_submitted(kind: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    job = Job(2, 1, ("x",), {}, {"W": "hunter2"})
    shown = find(kind, job).dry_run(job)
    assert "sbatch" not in shown
    assert "srun --ntasks=3" in shown
    assert "hunter2" not in shown


def test_ssh_shows_who_runs_where(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-n", "3", "-s", "1", "-H", "hosts", "--sync-dst-dir", "/job", "--dry-run", "x"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("# ") and not line.startswith("#  ")] == [
        "# scheduler: on this machine",
        "# node1: server 0, worker 0",
        "# node2: worker 1",
        "# localhost: worker 2",
    ]
    commands = [line.split()[0] for line in lines if not line.startswith("#")]
    assert commands == ["rsync", "ssh", "rsync", "ssh", "rsync", sys.executable]


def test_ssh_shows_the_aggregators(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-n", "5", "-s", "1", "-H", "hosts", "--dry-run"]
    assert main([*words, "x"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("# ") and not line.startswith("#  ")][1:] == [
        "# node1: server 0, worker 0",
        "# node2: aggregator 0, worker 1, worker 2",
        "# localhost: aggregator 1, worker 3, worker 4",
    ]
    (shown,) = (line for line in lines if line.startswith("#   aggregator 1: "))
    assert "DMLC_ROLE=aggregator" in shown
    assert "KVSTORE_NUM_AGGREGATORS=2" in shown
    assert shown.endswith(" servers")
    assert [line.split("KVSTORE_AGGREGATOR=")[1].split()[0] for line in lines if line.startswith("#   worker")] == [
        *("-1", "0", "0", "1", "1")
    ]
    assert main([*words, "--no-host-aggregation", "x"]) == 0
    assert "aggregator" not in capsys.readouterr().out.lower()


def test_only_what_is_computed_has_a_value() -> None:
    shown = dryrun.variables({"DMLC_ROLE": "worker", "KVSTORE_SECRET_KEY": "hunter2", "B": "", "A": "hunter2"})
    assert shown == "A=... B=... DMLC_ROLE=worker KVSTORE_SECRET_KEY=..."
