"""The hosts that other tests rely on: that they are as separate as they claim, and that nothing of them is left.

That MPI, Slurm and Grid Engine run on them, and that a cut is one, the tests of launchers show.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from cluster.hosts import STATE, Hosts
from cluster.missing import missing
from cluster.mpi import Mpi
from cluster.namespaces import child
from cluster.watch import watch_ps
from waiting import LONG, until

TESTS = Path(__file__).resolve().parents[1]


def ssh(config: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["ssh", "-F", f"{config}", "-o", "BatchMode=yes", "-o", "ConnectTimeout=2", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def test_each_has_its_own_memory_files_and_processes(hosts: Hosts, tmp_path: Path) -> None:
    assert hosts.run(0, ["touch", "/dev/shm/one", "/tmp/two", "/root/three", f"{tmp_path}/shared"]).returncode == 0
    assert hosts.shared_memory(0) == ["one"]
    assert hosts.shared_memory(1) == []
    assert hosts.run(1, ["ls", "/tmp/two", "/root/three"]).stdout == ""
    assert hosts.run(1, ["ls", f"{tmp_path}"]).stdout == "shared\n"
    assert not Path("/dev/shm/one").exists()
    assert not Path("/tmp/two").exists()
    assert len(hosts.run(1, ["ps", "-e", "-o", "pid="]).stdout.split()) <= 4, "it sees processes of others"


def test_processes_are_found_and_ended(hosts: Hosts) -> None:
    with child(["ssh", "-F", f"{hosts.ssh_config}", hosts.addresses[1], "sleep 999"]) as login:
        until(lambda: "sleep 999" in hosts.processes(1).values(), "a process to be seen")
        assert hosts.processes(0) == {}
        hosts.clear()
        assert hosts.processes(1) == {}
        assert login.wait(LONG) == 255
    assert ssh(hosts.ssh_config, hosts.addresses[1], "hostname").returncode == 0, "its sshd was to stay"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_of_a_run_that_is_killed(hosts: Hosts, how: signal.Signals) -> None:
    script = """
        import signal
        from cluster.hosts import Hosts
        signal.signal(signal.SIGINT, signal.default_int_handler)  # who is started in the background ignores it
        with Hosts.up(2) as hosts:
            for i in range(2):
                hosts.run(i, ["sh", "-c", "sleep 999 >/dev/null 2>&1 &"])
            print(hosts.interface, hosts.directory, *(pid for i in range(2) for pid in hosts.processes(i)), flush=True)
            signal.pause()
    """
    program = "\n".join(line[8:] for line in script.splitlines())
    with child(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": f"{TESTS}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as run:
        assert run.stdout is not None
        interface, directory, *pids = run.stdout.readline().split()
        assert Path(f"/sys/class/net/{interface}").exists()
        assert len(pids) == 2
        run.send_signal(how)
        run.wait(LONG)
    until(lambda: not Path(f"/sys/class/net/{interface}").exists(), "the network to go")
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the processes to die")
    if how == signal.SIGKILL:
        with Hosts.up(0):
            pass  # sweeps, if no other run has by now
    assert not Path(directory).exists()
    assert hosts.directory in STATE.iterdir(), "those in use were to stay"


def test_watch_ps_sees_what_stands_on_a_command_line_anywhere(hosts: Hosts) -> None:
    words = [uuid.uuid4().hex for _ in range(3)]
    with watch_ps(words) as seen:
        hosts.run(0, ["sh", "-c", f"sleep 0.2; : {words[0]}"])
        hosts.run(1, ["sleep", "0.2"], env=os.environ | {"SECRET": words[1]})
        hosts.run(2, ["sh"], text=f"sleep 0.2 # {words[2]}")
    assert seen
    assert all(words[0] in line for line in seen)
    assert not any(words[1] in line or words[2] in line for line in seen)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing("sh") == ""
    assert missing("sh", "no-such-program").startswith("not installed: no-such-program (")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert missing("sh") == "hosts are made of namespaces, which need root"


def test_mpirun_is_the_one_that_was_asked_for(mpirun: Mpi) -> None:
    said = mpirun.run("--version").stdout
    assert {"openmpi": "(Open MPI)", "mpich": "HYDRA"}[mpirun.kind] in said
