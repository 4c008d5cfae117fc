"""Jobs on other hosts that are observed and read."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster.hosts import ROOT, Hosts
from cluster.namespaces import child
from cluster.slurm import Slurm
from endless import UNTIL_OVER
from trace_reader import ReadTrace
from waiting import LONG, until

from kvstore.job.directory import launcher_of, private_directories, temporary_root
from kvstore.job.place import FILE

# ---- jobs under a real Slurm, of srun alone and of launch.py, have a status, a page and a trace, as elsewhere


OPENED = """
    import sys, urllib.request
    from http.cookiejar import CookieJar

    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    print(browser.open(sys.argv[1], timeout=60).read().decode())
"""
STATUS = [sys.executable, "-m", "kvstore.observing.status_command"]


def prepare(slurm: Slurm, directory: Path) -> str:
    """The script of a job that runs until a file ``over`` is beside it."""
    slurm.env.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    (script := directory / "script.py").write_text(textwrap.dedent(UNTIL_OVER))
    return str(script)


def said(process: subprocess.Popen[bytes], log: Path) -> Callable[[], str | None]:
    """What a process has said if it has ended, and so will say no more."""
    return lambda: None if process.poll() is None else log.read_text()


def wait_until_it_runs(slurm: Slurm, job: subprocess.Popen[bytes], log: Path) -> list[str]:
    """Wait until the only job is at work; return the words that show its status."""
    (number,) = until(slurm.jobs, "the job", over=said(job, log), step=0.1)
    words = ["srun", "--overlap", f"--jobid={number}", "-N1", "-n1", *STATUS]
    at_work = r"2 of 2 workers, 1 of 1 server · [0-9]{2,} rounds"
    until(lambda: re.search(at_work, slurm.run(*words).stdout), "the status", over=said(job, log), step=0.5)
    return words


def page(slurm: Slurm, text: str) -> str:
    """The page whose address is in a text, as a browser on the first node shows it."""
    address = re.search(r"http://\S+", text)
    assert address is not None
    return slurm.hosts.run(0, [sys.executable, "-c", textwrap.dedent(OPENED), address[0]]).stdout


def shown(trace: Path) -> set[str]:
    """The members in a trace whose clocks have been compared."""
    read = ReadTrace.of(trace)
    assert read.about["clocks are consistent"]
    assert set(read.about["clock errors in us, at most"]) == set(read.names.values())
    return set(read.names.values())


@pytest.mark.release
def test_a_job_of_srun_alone_on_two_nodes(slurm: Slurm, tmp_path: Path) -> None:
    words = ["srun", "-N2", "-n2", "--mpi=none", sys.executable, prepare(slurm, tmp_path)]
    slurm.env.update(DMLC_NUM_SERVER="1", KVSTORE_JOB_SECRET=secrets.token_hex(32))
    slurm.env.update(MASTER_ADDR=slurm.hosts.addresses[0], MASTER_PORT="29511")
    log, seen, trace = tmp_path / "log", tmp_path / "seen", tmp_path / "trace.json"
    with log.open("w") as out, child(words, env=slurm.env, stdout=out, stderr=out) as job:
        status = wait_until_it_runs(slurm, job, log)
        words = [*status, "--page", "--trace", f"{trace}:5"]
        with seen.open("w") as out, child(words, env=slurm.env, stdout=out, stderr=out) as observer:
            until(lambda: f"{trace} has" in seen.read_text(), "the trace", over=said(observer, seen))
            assert "<title>" in page(slurm, seen.read_text())
            (tmp_path / "over").touch()
            assert job.wait(LONG) == 0, log.read_text()
    assert shown(trace) >= {"worker 0", "worker 1", "server 0"}


@pytest.mark.faults
def test_a_job_of_launch_py_from_outside(slurm: Slurm, tmp_path: Path) -> None:
    prepare(slurm, tmp_path)
    words = [sys.executable, "-m", "launcher", "--launcher", "slurm", "--cluster-option=--nodes=2", "-n2", "-s1"]
    words += ["--dashboard", "--trace", "trace.json:5", "python", "script.py"]
    log = tmp_path / "log"
    with log.open("w") as out, child(words, env=slurm.env, cwd=tmp_path, stdout=out, stderr=out) as job:
        status = wait_until_it_runs(slurm, job, log)
        assert "<title>" in page(slurm, log.read_text())
        files = list(tmp_path.glob(".kvstore-*"))
        assert {path.suffix for path in files} == {".out", ".err", ".end"}
        assert {path.stat().st_mode & 0o777 for path in files} == {0o600}, "the page's token is in one of them"
        done = slurm.run(*status, "--trace", f"{tmp_path}/second.json:5")
        assert done.returncode == 0, done.stderr
        (tmp_path / "over").touch()
        assert job.wait(LONG) == 0, log.read_text()
    assert shown(tmp_path / "second.json") == {"worker 0", "worker 1", "server 0"}
    assert shown(tmp_path / "trace.json") == {"scheduler", "worker 0", "worker 1", "server 0"}


# ---- a reader and an observer on another host than the job's, over encrypted links, with the files of launch.py


# The array is one segment: only then are all of its values of one round.
TRAIN = """
from pathlib import Path
import torch, kvstore as kv
store = kv.create("dist_sync")
store.set_optimizer("sgd", learning_rate=1.0)
store.init("w", torch.zeros(30_000))
while not Path("stop").exists():
    store.pushpull("w", -torch.ones(30_000), out=torch.empty(30_000))
"""

READ = """
import sys, kvstore as kv
with kv.connect(sys.argv[1], timeout=30) as reader:
    reader.wait_for("w")
    while (value := reader.pull("w")).min() < 5:
        pass
    assert value.tolist() == [value[0]] * 30_000
print("read")
"""


@pytest.mark.release
def test_a_reader_and_an_observer_on_another_host(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "hosts").write_text("".join(f"{name}\n" for name in hosts.names[:2]))
    file = tmp_path / "readers.json"
    words = ["-n", "1", "-s", "2", "-H", "hosts", "--ssh-config", str(hosts.ssh_config), "--readers", str(file)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "launcher", *words, "python", "train.py"],
            cwd=tmp_path,
            env=env,
            stdout=log,
            stderr=log,
        )
        try:
            until(file.exists, "the file for readers", over=lambda: process.poll() and (tmp_path / "log").read_text())
            assert json.loads(file.read_text())["key"]
            done = hosts.run(3, [sys.executable, "-c", READ, str(file)], env={"PYTHONPATH": str(ROOT)})
            assert done.stdout == "read\n", done.stderr
            status = [sys.executable, "-m", "kvstore.observing.status_command"]
            here = subprocess.run(
                [*status, str(process.pid), "--json"], env=env, capture_output=True, text=True, check=True
            )
            assert json.loads(here.stdout)["status"]["expected"]["server"] == 2
            (place,) = (
                each / FILE for each in private_directories(temporary_root()) if launcher_of(each).pid == process.pid
            )
            copy = shutil.copy(place, tmp_path)
            there = hosts.run(3, [*status, copy], env={"PYTHONPATH": str(ROOT)})
            assert "1 of 1 worker, 2 of 2 servers" in there.stdout, there.stderr
            assert json.loads(Path(copy).read_text())["key"] not in here.stdout + there.stdout
            (tmp_path / "stop").touch()
            assert process.wait(LONG) == 0, (tmp_path / "log").read_text()
        finally:
            process.terminate()
            process.wait()
