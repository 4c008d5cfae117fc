"""Jobs over ssh: the command lines of launch.py and mpirun."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from places import HOSTS

from benchmarks import remote as remote_module
from benchmarks.contenders import Work
from benchmarks.jobs import Unavailable
from benchmarks.peers import Peers
from benchmarks.remote import SETTINGS, Launched, OpenMpi, open_mpi
from benchmarks.ssh import Ssh
from launcher.cli import parse

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


@pytest.mark.parametrize("name", SETTINGS)
def test_other_settings_say_so_in_the_name_of_their_row(ssh, name):
    default, other = Launched(WORK, ssh), Launched(WORK, ssh, SETTINGS[name])
    assert default.name == "kvstore"
    assert other.name == f"kvstore, {SETTINGS[name].label}"
    words = other.command(["program"])
    assert [words[i + 1] for i, word in enumerate(words) if word == "--env"] == list(SETTINGS[name].env)
    assert ("--no-encryption" in words) == name.startswith("plain")


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


def test_open_mpi_lets_ranks_that_wait_give_way_and_binds_none_to_a_core(ssh):
    words = OpenMpi(WORK, Peers((), ssh.folder), ssh).command("mpirun", ["program"])
    assert words[:3] == ["mpirun", "-np", "8"]
    assert words[words.index("plm_rsh_agent") + 1] == f"ssh -F {ssh.config}"
    assert words[words.index("mpi_yield_when_idle") + 1] == "1"
    assert words[words.index("--bind-to") + 1] == "none"
    assert words[-1] == "program"


def test_servers_may_have_hosts_of_their_own(ssh):
    words = Launched(WORK, ssh, apart=HOSTS[1:]).command(["program"])
    assert Path(words[words.index("-H") + 1]).read_text() == "10.77.0.1 slots=8\n"
    assert Path(words[words.index("--server-hosts") + 1]).read_text() == "10.77.0.2 slots=2\n"


@pytest.mark.parametrize(
    ("installed", "said", "found"),
    [
        ({"mpirun.openmpi", "mpirun"}, "mpirun (Open MPI) 4.1.4", "/bin/mpirun.openmpi"),
        ({"mpirun"}, "mpirun (Open MPI) 5.0.1", "/bin/mpirun"),
        ({"mpirun"}, "HYDRA build details:", None),
        (set(), "", None),
    ],
)
def test_open_mpi_is_found_beside_other_kinds(monkeypatch, installed, said, found):
    monkeypatch.setattr(remote_module.shutil, "which", lambda name: f"/bin/{name}" if name in installed else None)
    monkeypatch.setattr(
        remote_module.subprocess, "run", lambda argv, **_: subprocess.CompletedProcess(argv, 0, stdout=said)
    )
    if found:
        assert open_mpi() == found
    else:
        with pytest.raises(Unavailable, match=r"there is no Open MPI; on Debian .* openmpi-bin"):
            open_mpi()
