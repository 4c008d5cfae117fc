"""The hosts that other tests rely on, and the real MPI, Slurm and Grid Engine on them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cluster.hosts import STATE, Hosts
from cluster.missing import missing
from cluster.mpi import Mpi
from cluster.namespaces import child
from cluster.sge import Sge
from cluster.slurm import Slurm
from cluster.watch import watch_ps
from waiting import LONG, until

# ---- the hosts that other tests rely on: that they are as separate as they claim, and that nothing of them is left


TESTS = Path(__file__).resolve().parents[1]


def ssh(config: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["ssh", "-F", f"{config}", "-o", "BatchMode=yes", "-o", "ConnectTimeout=2", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def test_ssh_reaches_each_by_its_name_and_both_addresses(hosts: Hosts) -> None:
    for i, name in enumerate(hosts.names):
        for place in (name, hosts.addresses[i], hosts.addresses6[i]):
            assert ssh(hosts.ssh_config, place, "hostname").stdout == f"{name}\n"


def test_ssh_reaches_one_from_another(hosts: Hosts) -> None:
    words = ["ssh", "-F", f"{hosts.ssh_config}", hosts.names[3], "hostname"]
    assert hosts.run(1, words).stdout == f"{hosts.names[3]}\n"


def test_a_host_whose_key_is_another_is_refused(hosts: Hosts, tmp_path: Path) -> None:
    known = tmp_path / "known"
    known.write_text((hosts.directory / "known_hosts").read_text().replace(f"{hosts.addresses[1]} ", "other "))
    known.write_text(known.read_text().replace(f"{hosts.addresses[0]} ", f"{hosts.addresses[1]} "))
    done = ssh(hosts.ssh_config, "-o", f"UserKnownHostsFile={known}", hosts.addresses[1], "hostname")
    assert done.returncode == 255
    assert "Host key verification failed" in done.stderr


def test_each_has_its_own_memory_files_and_processes(hosts: Hosts, tmp_path: Path) -> None:
    assert hosts.run(0, ["touch", "/dev/shm/one", "/tmp/two", "/root/three", f"{tmp_path}/shared"]).returncode == 0
    assert hosts.shared_memory(0) == ["one"]
    assert hosts.shared_memory(1) == []
    assert hosts.run(1, ["ls", "/tmp/two", "/root/three"]).stdout == ""
    assert hosts.run(1, ["ls", f"{tmp_path}"]).stdout == "shared\n"
    assert not Path("/dev/shm/one").exists()
    assert not Path("/tmp/two").exists()
    assert len(hosts.run(1, ["ps", "-e", "-o", "pid="]).stdout.split()) <= 4, "it sees processes of others"


def test_they_import_what_we_do(hosts: Hosts) -> None:
    done = ssh(
        hosts.ssh_config, hosts.addresses[0], f"cd {TESTS.parent} && {sys.executable} -c 'import msgpack, kvstore'"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_cut_is_silent_and_can_be_mended(hosts: Hosts) -> None:
    hosts.cut(2)
    with pytest.raises(TimeoutError):
        socket.create_connection((hosts.addresses[2], 22), 0.5)
    assert ssh(hosts.ssh_config, hosts.addresses[1], "hostname").returncode == 0
    hosts.mend(2)
    # After seconds without an answer Linux takes the host for gone, and asks for it anew only now and then.
    until(lambda: hosts.answers(2), "the host to be there again")


def test_three_ways_not_to_answer(hosts: Hosts) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((hosts.refusing, 22), 5)
    with ThreadPoolExecutor() as both:
        silent = both.submit(socket.create_connection, (hosts.silent, 22), 5)
        nobody = both.submit(socket.create_connection, (hosts.nobody, 22), 15)
    assert isinstance(silent.exception(), TimeoutError)
    assert "No route to host" in str(nobody.exception())


def test_processes_are_found_and_ended(hosts: Hosts) -> None:
    with child(["ssh", "-F", f"{hosts.ssh_config}", hosts.addresses[1], "sleep 999"]) as login:
        until(lambda: "sleep 999" in hosts.processes(1).values(), "a process to be seen")
        assert hosts.processes(0) == {}
        hosts.clear()
        assert hosts.processes(1) == {}
        assert login.wait(LONG) == 255
    assert ssh(hosts.ssh_config, hosts.addresses[1], "hostname").returncode == 0, "its sshd was to stay"


def test_a_job_from_outside_has_an_ssh_that_knows_the_hosts(hosts: Hosts) -> None:
    words = ["ssh", hosts.addresses[0], "echo $SSH_CONNECTION"]
    done = subprocess.run(words, env=hosts.launcher_env, capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == hosts.outside


def test_ports_rate_and_loss_of_power(hosts: Hosts) -> None:
    with Hosts.up(2, rate="100mbit", ports=[2201]) as others:
        assert set(others.addresses).isdisjoint(hosts.addresses)
        assert ssh(others.ssh_config, others.names[0], "hostname").stdout == f"{others.names[0]}\n"
        assert ssh(others.portless_ssh_config, others.names[0], "hostname").returncode == 255
        assert ssh(others.portless_ssh_config, "-p", "2201", others.names[0], "hostname").returncode == 0
        assert ssh(others.portless_ssh_config, others.names[1], "hostname").returncode == 0
        assert "rate 100Mbit" in others.run(0, ["tc", "qdisc", "show", "dev", "eth0"]).stdout
        others.crash(0)
        with pytest.raises(TimeoutError):
            socket.create_connection((others.addresses[0], 2201), 0.5)


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


# ---- Open MPI and MPICH over the hosts: that they are what they are said to be, and what a launcher relies on


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


# ---- a real Slurm: that it runs what it is given, on both nodes, and says how it ended


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


# ---- a real Grid Engine: that it runs what it is given, on both hosts, and says how it ended


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
