"""Measurements over hosts: command lines, processes, and namespaces."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster.missing import need
from places import HOSTS

from benchmarks import hosts as hosts_module
from benchmarks import remote as remote_module
from benchmarks.contenders import Work
from benchmarks.hosts import INTERFACE, hosts, require
from benchmarks.jobs import JobFailed, Member, Unavailable, run
from benchmarks.peers import Peers
from benchmarks.remote import SETTINGS, Launched, OpenMpi
from benchmarks.ssh import Ssh
from launcher.cli import parse

# ---- hosts that are network namespaces; the facts about a machine


def test_hosts_need_iproute2_and_say_so(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(hosts_module.shutil, "which", lambda tool: None)
    with pytest.raises(Unavailable, match=r"ip and tc and mount and unshare and hostname; on Debian .* iproute2"):
        require()


def test_hosts_are_removed_when_making_them_fails(monkeypatch):
    said = []

    def pretend(*words):
        said.append(words)
        if words[0] == "tc":
            raise Unavailable("no tbf")
        return ""

    monkeypatch.setattr(hosts_module, "require", lambda: None)
    monkeypatch.setattr(hosts_module, "run", pretend)
    with pytest.raises(Unavailable, match="no tbf"), hosts(2):
        pass
    added = {words[3] for words in said if words[:3] == ("ip", "netns", "add")}
    removed = {words[3] for words in said if words[:3] == ("ip", "netns", "del")}
    assert len(added) == 2
    assert added <= removed


@pytest.mark.long
def test_hosts_are_as_they_should_be_share_no_memory_and_leave_nothing_behind():
    need("ip", "tc")
    try:
        with hosts(2, mtu=9000) as (one, other):
            for host in (one, other):
                words = host.wrap(["cat", f"/sys/class/net/{INTERFACE}/mtu"])
                assert subprocess.run(words, check=True, capture_output=True, text=True).stdout == "9000\n"
                named = subprocess.run(host.wrap(["hostname"]), check=True, capture_output=True, text=True).stdout
                assert named.strip() == host.namespace
            subprocess.run(one.wrap(["touch", "/dev/shm/mine"]), check=True)
            assert subprocess.run(one.wrap(["test", "-e", "/dev/shm/mine"]), check=False).returncode == 0
            assert subprocess.run(other.wrap(["test", "-e", "/dev/shm/mine"]), check=False).returncode == 1
            assert not Path("/dev/shm/mine").exists()
    except Unavailable as error:
        pytest.skip(str(error))
    assert not Path(one.shm).exists()
    assert (
        one.namespace not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    )


# ---- processes of a measurement: all end together, and what they say is quoted


def python(script: str, name: str = "it", **env: str) -> Member:
    return Member(name, [sys.executable, "-c", script], env)


def test_one_that_fails_ends_the_others_and_is_quoted(tmp_path):
    path, draft = str(tmp_path / "pid"), str(tmp_path / "draft")
    script = (
        f"import os, time; open({draft!r}, 'w').write(str(os.getpid())); os.rename({draft!r}, {path!r}); time.sleep(60)"
    )
    failing = f"import os, sys, time\nwhile not os.path.exists({path!r}): time.sleep(.01)\nsys.exit('Boom')"
    start = time.monotonic()
    with pytest.raises(JobFailed, match="worker 1 exited with 1:\n    Boom"):
        run([python(script, "worker 0"), python(failing, "worker 1")], tmp_path / "report")
    assert time.monotonic() - start < 50
    pid = int(Path(path).read_text())
    assert not Path(f"/proc/{pid}").exists()


def test_one_that_does_not_end_is_named(tmp_path):
    with pytest.raises(JobFailed, match=r"it had not ended after 0\.3 s"):
        run([python("import time; time.sleep(60)")], tmp_path / "report", timeout_s=0.3)


# ---- jobs over ssh: the command lines of launch.py and mpirun


WORK = Work("10MB", workers=8, servers=2)


@pytest.fixture
def ssh(tmp_path):
    return Ssh(HOSTS, tmp_path)


def test_our_jobs_are_started_as_a_user_starts_them(ssh):
    words = Launched(WORK, ssh).command(["python", "-m", "program", "a b"])
    assert words[1:3] == ["-m", "launcher"]
    job = parse(words[3:], {}).job
    assert (job.num_workers, job.num_servers) == (8, 2)
    assert job.cluster.ssh_config == str(ssh.config)
    assert [shlex.split(word) for word in job.command] == [["python", "-m", "program", "a b"]]
    hostfile = Path(words[words.index("-H") + 1])
    assert hostfile.read_text() == "10.77.0.1 slots=4\n10.77.0.2 slots=4\n"
    assert not {"--no-encryption", "--env"} & set(words)


def test_the_job_starts_on_the_first_host_and_what_it_has_sent_is_kept(ssh, monkeypatch):
    started = []

    def pretend(members, path):
        started.extend(members)
        return {"times": [1.0, 2.0], "sent": 1e7}

    monkeypatch.setattr(remote_module, "run", pretend)
    monkeypatch.setattr(remote_module, "open_mpi", lambda: "mpirun")
    monkeypatch.setattr(Peers, "openmpi", lambda self: "python")
    ours = Launched(WORK, ssh, SETTINGS["2bit"])
    assert ours.run() == {"kvstore, 2bit, fp16 back": [1.0, 2.0]}
    mpi = OpenMpi(WORK, Peers((), ssh.folder), ssh)
    assert mpi.run() == {"openmpi": [1.0, 2.0]}
    assert ours.sent == mpi.sent == [1e7]
    assert [member.place for member in started] == [HOSTS[0], HOSTS[0]]
    program = shlex.split(started[0].argv[-1])
    assert program[1:3] == ["-m", "benchmarks.programs.rounds"]
    assert program[program.index("--compression") + 1] == '{"type": "2bit", "threshold": 1.0, "pull": "fp16"}'
