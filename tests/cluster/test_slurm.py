"""A real Slurm: that it runs what it is given, on both nodes, and says how it ended."""

from __future__ import annotations

import signal
import subprocess
import uuid
from pathlib import Path

from cluster.namespaces import child
from cluster.slurm import Slurm
from cluster.watch import watch_ps
from waiting import LONG, until


def test_srun_runs_on_all_nodes(slurm: Slurm) -> None:
    done = slurm.run("srun", "-n", "16", "hostname")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == sorted(slurm.hosts.names * 8)


def test_srun_passes_the_environment_and_nobody_sees_it(slurm: Slurm) -> None:
    word = uuid.uuid4().hex  # no other test's processes have it
    slurm.env["SECRET"] = f'a "{word}", of $x'
    with watch_ps([word]) as seen:
        done = slurm.run("srun", "-N", "2", "sh", "-c", 'sleep 0.2; echo "$SECRET"')
    assert done.stdout.splitlines() == [f'a "{word}", of $x'] * 2
    assert seen == []


def test_a_task_that_fails_ends_the_others_if_asked_to(slurm: Slurm, tmp_path: Path) -> None:
    fails = f"until [ -e {tmp_path}/up ]; do sleep 0.05; done; exit 7"  # Slurm's TERM is for what has begun
    words = ["-N", "2", "--kill-on-bad-exit=1", "sh", "-c"]
    done = slurm.run("srun", *words, f"[ $SLURM_PROCID != 1 ] || {{ {fails}; }}; touch {tmp_path}/up; exec sleep 999")
    assert "task 1: Exited with exit code 7" in done.stderr
    codes = (128 + signal.SIGTERM, 128 + signal.SIGKILL)  # the second where the first was not enough for KillWait
    assert done.returncode in codes, "the largest of all codes, which is not that of the first"


def test_sbatch_waits_and_ends_as_the_script_does(slurm: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\nhostname\nsrun hostname\nexit 7\n")
    done = slurm.run("sbatch", "--wait", "-N", "2", "-o", f"{tmp_path}/out", f"{script}")
    first, *tasks = (tmp_path / "out").read_text().split()
    assert done.returncode == 7
    assert first == slurm.hosts.names[0]
    assert sorted(tasks) == list(slurm.hosts.names)


def test_scancel(slurm: Slurm) -> None:
    def tasks() -> list[str]:
        lines = [line for i in range(2) for line in slurm.hosts.processes(i).values()]
        return [line for line in lines if line.endswith("sleep 999")]

    with child(["srun", "-N", "2", "sleep", "999"], env=slurm.env, stderr=subprocess.DEVNULL) as running:
        until(lambda: len(tasks()) == 2, "each task to start")
        assert slurm.run("scancel", *slurm.jobs()).returncode == 0
        assert running.wait(LONG) != 0
    until(lambda: not slurm.jobs(), "the job to be gone")
    assert tasks() == []
