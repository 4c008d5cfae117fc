"""A real Grid Engine: that it runs what it is given, on both hosts, and says how it ended."""

from __future__ import annotations

from pathlib import Path

from cluster.sge import Sge
from waiting import until


def test_qsub_waits_and_ends_as_the_job_does(sge: Sge, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("hostname\nexit 7\n")
    done = sge.run("qsub", "-sync", "y", "-cwd", "-j", "y", "-o", "out", f"{script}", cwd=tmp_path)
    assert done.returncode == 7, done.stdout + done.stderr
    assert (tmp_path / "out").read_text().strip() in sge.hosts.names


def test_an_array_of_tasks_runs_on_both_hosts(sge: Sge, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("echo $SGE_TASK_ID $(hostname)\n")
    done = sge.run(
        "qsub", "-sync", "y", "-t", "1-4", "-cwd", "-j", "y", "-o", "out.$TASK_ID", f"{script}", cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [(tmp_path / f"out.{number}").read_text().split() for number in range(1, 5)]
    assert [number for number, _ in lines] == ["1", "2", "3", "4"]
    assert {name for _, name in lines} == set(sge.hosts.names)


def test_qdel(sge: Sge) -> None:
    sge.run("qsub", "-t", "1-4", "-b", "y", "-o", "/dev/null", "-e", "/dev/null", "sleep", "999")
    until(lambda: all("sleep 999" in sge.hosts.processes(i).values() for i in range(2)), "each host to have a task")
    assert sge.run("qdel", *set(sge.jobs())).returncode == 0
    until(lambda: not sge.jobs(), "the job to be gone")
    for i in range(2):
        assert "sleep 999" not in sge.hosts.processes(i).values()
