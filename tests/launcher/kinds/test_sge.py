"""Jobs by Grid Engine: what it is told, and the real one when it has too little to give or nothing works."""

from __future__ import annotations

import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import goldens
import pytest
from sites import Site, place
from waiting import until

from launcher.job.description import Cluster, Job
from launcher.kinds import sge as kind

FULL: dict[str, Any] = {
    "job_name": "mnist",
    "queue": "long.q",
    "time": "2:00:00",
    "worker_memory": "6g",
    "server_memory": "500m",
    "cluster_option": ("-pe", "smp", "4", "-P", "a project"),
}


def job(python: str = "/usr/bin/python3", **cluster: Any) -> Job:
    return Job(2, 1, ("python train.py",), env_worker={"W": "a-secret"}, cluster=Cluster(python=python, **cluster))


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    with place("sge", request, tmp_path) as made:
        yield made


@pytest.mark.parametrize(("name", "options"), [("sge", FULL), ("sge-plain", {})])
def test_the_dry_run_is_as_it_was(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.kinds.kind.source_root", lambda: None)
    monkeypatch.chdir("/")
    text = kind.dry_run(job(**options)) + "\n"
    assert "a-secret" not in text
    goldens.same(f"{name}.sh", text)


def test_the_script_reads_its_ticket_wherever_that_is(tmp_path: Path) -> None:
    folder = tmp_path / "a b's $(id) %j"
    folder.mkdir()
    (folder / "ticket").write_text("tcp://10.0.0.1:9 a b c\n")
    python = tmp_path / "a python"
    python.write_text('#!/bin/sh\nprintf "%s" "$KVSTORE_ENLIST" >got\n')
    python.chmod(0o755)
    text = kind.script(job(str(python)), str(folder / "ticket"))
    subprocess.run(["/bin/sh", "-s"], input=text, text=True, cwd=tmp_path, check=True)
    assert (tmp_path / "got").read_text() == "tcp://10.0.0.1:9 a b c"
    (folder / "ticket").unlink()
    assert subprocess.run(["/bin/sh", "-s"], input=text, text=True, cwd=tmp_path, check=False).returncode == 1


def test_fewer_slots_than_processes(site: Site) -> None:
    """It says how many there are, again and again; and Ctrl-C removes those that run and those that wait."""
    assert site.run is not None
    prelude = "import launcher.agents.manager as e; e.NOTICE_S = 1.0"
    option = ("--cluster-option=-pe", "--cluster-option=kvstore", "--cluster-option=6")  # slots for each process
    run = site.launch(*option, "-n", "2", "-s", "1", "python", "-c", "1", env={"PRELUDE": prelude})
    until(lambda: "launch.py: 2 of 3 processes (on " in run.err, "launch.py to say how many there are", over=run.over)
    run.send(signal.SIGINT)
    assert run.wait() == 130
    until(lambda: not site.run("qstat", "-u", "*").stdout, "the job to be gone")  # type: ignore[misc]
    until(lambda: not site.relics(), "everything to be gone")


def test_the_ticket_is_for_this_user_alone(site: Site) -> None:
    assert site.run is not None
    run = site.sleepers()
    (ticket,) = site.directory.glob(".kvstore-*/ticket")
    assert ticket.stat().st_mode & 0o777 == 0o600
    assert ticket.parent.stat().st_mode & 0o777 == 0o700
    secret = ticket.read_text().split()[-1]
    shown = site.run(*shlex.split("qstat -j *")).stdout
    assert "kvstore-" in shown
    assert secret not in shown + run.err
    assert not site.left(secret)
    run.send(signal.SIGINT)
    assert run.wait() == 130
    assert not ticket.parent.exists()
