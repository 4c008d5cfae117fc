"""Jobs by mpirun: what it is told, what becomes of what it says, and its failures, with the real Open MPI and MPICH."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import goldens
import pytest
from cluster.hosts import Hosts
from cluster.mpi import KINDS
from sites import place

from launcher.errors import LaunchError
from launcher.hosts.hostfile import read
from launcher.job.description import Cluster, Job
from launcher.kinds import mpi

HOSTFILE = "# ours\nnode1 slots=4\n\nnode2\n10.0.0.3 slots=2\n"
SAYS = {
    "mpirun (Open MPI) 4.1.4\n": "Open MPI",
    "mpirun (OpenRTE) 2.1.1\n": "Open MPI",
    "HYDRA build details:\n    Version: 4.0.2\n": "MPICH",
    "Intel(R) MPI Library for Linux* OS, Version 2021.9\n": "MPICH",
}


def fake(says: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = path / "mpirun"
    program.write_text(f"#!/bin/sh\ncat <<'.'\n{says}.\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path}:{os.environ['PATH']}")


def job(**cluster: Any) -> Job:
    secret = {"W": "a-secret"}
    return Job(2, 1, ("python train.py",), env_worker=secret, env_names=("HOME",), cluster=Cluster(**cluster))


@pytest.mark.parametrize("name", ["openmpi", "mpich"])
def test_the_dry_run_is_as_it_was(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(
        {flavor: says for says, flavor in SAYS.items()}[{"openmpi": "Open MPI"}.get(name, "MPICH")],
        tmp_path,
        monkeypatch,
    )
    monkeypatch.setattr("launcher.kinds.kind.source_root", lambda: None)
    (tmp_path / "hosts").write_text(HOSTFILE)
    plain = mpi.dry_run(job(python="/usr/bin/python3"))
    options = {"hostfile": str(tmp_path / "hosts"), "cluster_option": ("--mca", "btl", "tcp,self")}
    text = f"{plain}\n{mpi.dry_run(job(python='/opt/a python', **options))}\n"
    assert "a-secret" not in text
    goldens.same(f"{name}.sh", text)


@pytest.mark.parametrize(("says", "flavor"), SAYS.items())
def test_mpirun_says_whose_it_is(says: str, flavor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(says, tmp_path, monkeypatch)
    assert mpi.detect() == flavor


def test_another_mpirun_and_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake("my own runner 1.0\n", tmp_path, monkeypatch)
    with pytest.raises(LaunchError, match=r"neither Open MPI's nor MPICH's; its --version prints: my own runner 1\.0"):
        mpi.detect()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="needs mpirun on PATH") as caught:
        mpi.detect()
    assert caught.value.exit_code == 127


@pytest.mark.parametrize("line", ["me@node1", "node1:2222"])
def test_users_and_ports_are_for_the_configuration_of_ssh(line: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"{line}\n")
    with pytest.raises(LaunchError, match=r"no user or port for node1; put them into ~/\.ssh/config"):
        mpi.hostfile(read(str(tmp_path / "hosts")), mpi.OPEN_MPI)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trouble", ["refusing", pytest.param("no interpreter", marks=pytest.mark.release)])
def test_what_fails_before_the_agents_are_there(
    kind: str, trouble: str, hosts: Hosts, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with place(kind, request, tmp_path) as site:
        words = ["--python", "/nowhere/python"]
        if trouble == "refusing":
            (tmp_path / "hosts").write_text(f"{hosts.addresses[0]}\n{hosts.refusing}\n")
            words = ["-H", str(tmp_path / "hosts")]
        run = site.launch(*words, "-n", "3", "-s", "1", "python", "-c", "1")
        assert run.wait() not in (0, -9), run.err
        wanted = f"connect to host {hosts.refusing} port 22" if trouble == "refusing" else "/nowhere/python"
        assert wanted in run.err
        assert "launch.py: mpirun " in run.err.splitlines()[-1]
        assert not site.relics()


@pytest.mark.cluster
@pytest.mark.long
def test_what_open_mpi_refuses_root(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    with place("openmpi", request, tmp_path) as site:
        site.env = {name: value for name, value in site.env.items() if "RUN_AS_ROOT" not in name}
        run = site.launch("-n", "1", "-s", "1", "python", "-c", "1")
        assert run.wait() == 1
        assert "launch.py: mpirun: mpirun has detected an attempt to run as root." in run.err
        assert run.err.splitlines()[-1] == ("launch.py: mpirun exited with code 1 after 0 of 2 processes had started")
        assert not site.relics()


@pytest.mark.release  # the dry run has it
def test_an_option_for_mpirun_reaches_it(hosts: Hosts, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    with place("openmpi", request, tmp_path) as site:
        words = ["--cluster-option=--map-by", "--cluster-option=node", "-n", "3", "-s", "1"]
        run = site.launch(*words, "python", "-c", "import socket; print(socket.gethostname())")
        assert run.wait() == 0, run.err
        assert [line.split()[-1] for line in run.lines] == list(hosts.names[1:])


@pytest.mark.cluster
@pytest.mark.release
def test_fifty_megabytes_arrive_though_they_are_read_slowly(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Nothing is lost, and nobody stores it meanwhile."""
    lines = 700_000
    code = f"import sys\nfor i in range({lines}): sys.stdout.write('%060d %d\\n' % (0, i))"
    # Reads nothing until launch.py has had the time to take all it would, and says how much memory it had by then.
    prelude = """
import atexit
atexit.register(lambda: print(*(line for line in open("/proc/self/status") if "VmHWM" in line), file=sys.stderr))
"""
    with place("mpich", request, tmp_path) as site:
        read, write = os.pipe()
        run = site.launch("-n", "1", "-s", "1", "python", "-c", code, env={"PRELUDE": prelude}, stdout=write)
        os.close(write)
        count, size = 0, 0
        with os.fdopen(read, "rb") as file:
            for line in file:
                assert line.endswith(b" %d\n" % count)
                count, size = count + 1, size + len(line)
                if count % 100_000 == 1:
                    time.sleep(0.3)  # which decides nothing: it gives launch.py the chance to take too much
        assert run.wait() == 0, run.err
        assert (count, size > 50e6) == (lines, True)
        assert int(run.err.split("VmHWM:")[1].split()[0]) < 100_000  # kB
