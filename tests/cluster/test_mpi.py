"""Open MPI and MPICH over the hosts: that they are what they are said to be, and what a launcher relies on."""

from __future__ import annotations

import signal
import uuid
from pathlib import Path

from cluster.mpi import Mpi
from cluster.watch import watch_ps
from waiting import until

RANK = "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"


def test_a_plain_mpirun_runs_on_all_hosts(mpirun: Mpi) -> None:
    done = mpirun.run("-n", "8", "--hostfile", f"{mpirun.hostfile(slots=2)}", "hostname")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == sorted(mpirun.hosts.names * 2)


def test_it_is_the_one_that_was_asked_for(mpirun: Mpi) -> None:
    said = mpirun.run("--version").stdout
    assert {"openmpi": "(Open MPI)", "mpich": "HYDRA"}[mpirun.kind] in said


def test_variables_are_passed_by_name_and_nobody_sees_them(mpirun: Mpi) -> None:
    word = uuid.uuid4().hex  # no other test's processes have it
    mpirun.env["SECRET"] = f'a "{word}" of $x'
    by_name = {"openmpi": ["-x", "SECRET"], "mpich": ["-genvlist", "SECRET"]}[mpirun.kind]
    words = ["-n", "4", "--hostfile", f"{mpirun.hostfile(slots=1)}", *by_name]
    with watch_ps([word]) as seen:
        done = mpirun.run(*words, "sh", "-c", 'sleep 0.2; echo "$SECRET"')
    assert done.stdout.splitlines() == [f'a "{word}" of $x'] * 4
    assert seen == []


def test_the_code_of_a_rank_that_fails(mpirun: Mpi) -> None:
    words = ["-n", "4", "--hostfile", f"{mpirun.hostfile(slots=1)}"]
    assert mpirun.run(*words, "sh", "-c", f"[ {RANK} != 1 ] || exit 7; sleep 0.5").returncode == 7


def test_nothing_is_left_when_mpirun_is_killed(mpirun: Mpi, tmp_path: Path) -> None:
    words = ["-n", "4", "--hostfile", f"{mpirun.hostfile(slots=1)}", "sleep", "999"]
    with mpirun.start(words, tmp_path / "log") as running:
        until(lambda: all("sleep 999" in mpirun.hosts.processes(i).values() for i in range(4)), "each rank to start")
        running.send_signal(signal.SIGKILL)
        until(lambda: not any(mpirun.hosts.processes(i) for i in range(4)), "the hosts to be empty")
