"""What holds on every kind of cluster: the real ssh, Open MPI, MPICH, Slurm and Grid Engine, over real hosts."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from cluster.watch import watch_ps
from launched import SPOKEN, WAITS, when_spoken
from proc import parent
from sites import KINDS, MANAGED, Running, Site, place
from waiting import until

CARRIERS = {"openmpi": "mpirun", "mpich": "mpirun", "slurm": "srun", "sge": "qsub"}
HOSTILE = b"a 'b' \"c\" $(id) `id` $HOME \\ %j\nsecond line\t* ; & | # \xc3\xa9 \xff!"
FOLDER = "a b's $(id) %j \N{SNOWMAN}"


@pytest.fixture(params=KINDS)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    with place(request.param, request, tmp_path) as made:
        yield made


@pytest.fixture(params=MANAGED)
def managed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    with place(request.param, request, tmp_path) as made:
        yield made


def ends(site: Site, run: Running, code: int | None = None) -> None:
    """It ends, with that exit code or at least not with 0, and leaves nothing anywhere."""
    ended = run.wait()
    assert ended == code if code is not None else ended > 0, run.err
    gone(site)


def gone(site: Site) -> None:
    """Nothing is left anywhere, soon: what is started here would stay for much longer."""
    until(lambda: not site.relics(), "nothing to be left", step=0.1)


def test_any_value_arrives_and_none_is_seen_and_a_worker_that_fails_is_named_with_its_host(site: Site) -> None:
    """Variables, words and the working directory may be anything; and secrets are on no command line, in no log.

    Worker 1 fails when worker 0 has ended in order and worker 2 has spoken, which is then ended.
    """
    folder, go = site.directory / FOLDER, site.directory / "go"
    folder.mkdir()
    secrets = [f"secret{number}{site.mark}" for number in range(3)]
    values = [HOSTILE + secret.encode() for secret in secrets]
    tell = (
        "import os, socket, sys, time; e = os.environb; "
        "print(socket.gethostname(), [e.get(k) for k in (b'W', b'S', b'P', b'KVSTORE_ENLIST')], "
        "[os.fsencode(a) for a in sys.argv[1:]], os.fsencode(os.getcwd()), flush=True)"
    )
    worker = (
        f"{tell}\nrank = os.environ['DMLC_TASK_ID']\n{when_spoken('server0', 'scheduler0')}"
        "def seen(other, text):\n"
        "    log = f'logs/worker-{other}.log'\n"
        "    return os.path.exists(log) and text in open(log).read()\n"
        "if rank == '1':\n"
        f"    while not (os.path.exists({str(go)!r}) and seen(0, 'exited with code 0') and seen(2, ' stdout F ')):\n"
        "        time.sleep(0.02)\n"
        "    os._exit(7)\n"
        f"if rank == '2': time.sleep(999)  # {site.mark}"
    )
    pairs = ("--env-worker", b"W:" + values[0], "--env-server", b"S:" + values[1], "--env", "P", "--log-dir", "logs")
    env = {b"FAKE_SERVER": f"{tell}; {SPOKEN}; {WAITS}".encode(), b"P": values[2]}
    with watch_ps(secrets[1:]) as seen:
        words = ("-n", "3", "-s", "1", *pairs, "--", "python", "-c", worker, HOSTILE, "")
        run = site.launch(*words, env=env, cwd=folder)
        until(lambda: run.out.count("[worker ") == 3, "the workers to speak", over=run.over)
        shown = ""
        if site.run is not None:
            commands = {
                "slurm": ("scontrol show job", "squeue --long", "scontrol show step"),
                "sge": ("qstat -f", "qstat -j *"),
            }[site.kind]
            shown = "".join(site.run(*shlex.split(command)).stdout for command in commands)
            assert "kvstore" in shown
        go.touch()
        assert run.wait() == 7, run.err
    said = dict(line.split("] ", 1) for line in run.out.splitlines())
    lines = {name: line.split(" ", 1) for name, line in said.items()}
    where = os.fsencode(str(folder))
    for rank in range(3):
        log = (folder / "logs" / f"worker-{rank}.log").read_text()
        assert lines[f"[worker {rank}"][1] == f"{[values[0], None, values[2], None]} {[HOSTILE, b'']} {where}"
        assert f" stdout F {said[f'[worker {rank}']}\n" in log
        assert ("launch.py: exited with code 0" in log) == (rank == 0)
    assert lines["[server 0"][1] == f"{[None, values[1], values[2], None]} {[]} {where}"
    hosts = [lines[f"[worker {rank}"][0] for rank in range(3)]
    assert set(hosts) <= set(site.hosts.names)
    assert len(set(hosts)) > 1
    name = site.hosts.addresses[site.hosts.names.index(hosts[1])] if site.kind == "ssh" else hosts[1]
    assert f"launch.py: worker 1 on {name} exited with code 7\n" in run.err
    # What is given on launch.py's own command line can be seen there and nowhere else.
    assert [line for line in seen if secrets[1] not in line or "--env-server" not in line] == []
    assert not [secret for secret in secrets if secret in shown + run.err]
    gone(site)
    assert {path.name for path in folder.iterdir()} == {"logs", "spoken-scheduler0", "spoken-server0"}


@pytest.mark.parametrize(
    "managed",
    # Jobs by Grid Engine end by SIGINT in tests of its own, and those of one mpirun as those of the other.
    [
        "openmpi",
        "slurm",
        pytest.param("mpich", marks=pytest.mark.release),
        pytest.param("sge", marks=pytest.mark.release),
    ],
    indirect=True,
)
def test_a_signal_ends_it(managed: Site) -> None:
    signum = signal.SIGTERM if managed.kind in ("mpich", "slurm") else signal.SIGINT
    run = managed.sleepers()
    run.send(signum)
    ends(managed, run, 128 + signum)


PYTHON = ("--python", "/nowhere/python")


@pytest.mark.parametrize(
    ("managed", "words", "code", "said"),
    [
        ("slurm", ("--queue", "nowhere"), 1, ("launch.py: sbatch failed: sbatch: error: ", "invalid partition")),
        ("slurm", PYTHON, 127, ("/nowhere/python: not found",)),
        ("sge", ("--queue", "x.q"), 1, ('job requests unknown queue "x.q"', "after 0 of 2 processes had started")),
        ("sge", PYTHON, None, ("a task has printed: ", "/nowhere/python: not found")),
    ],
    indirect=["managed"],
)
def test_what_the_manager_or_a_host_refuses_is_told(
    managed: Site, words: tuple[str, ...], code: int | None, said: tuple[str, ...]
) -> None:
    run = managed.launch("-n", "1", "-s", "1", *words, "python", "-c", "1")
    ends(managed, run, code)
    assert all(text in run.err for text in said), run.err


@pytest.mark.release
def test_launch_py_is_killed(managed: Site) -> None:
    run = managed.sleepers()
    run.send(signal.SIGKILL)
    run.wait()
    gone(managed)
    if managed.run is not None:
        jobs = {"slurm": ("squeue", "--noheader"), "sge": ("qstat", "-u", "*")}[managed.kind]
        until(lambda: not managed.run(*jobs).stdout, "the job to be gone")  # type: ignore[misc]


@pytest.mark.release
def test_an_agent_is_killed(managed: Site) -> None:
    run = managed.sleepers()
    pid, host = managed.worker(1)
    os.kill(parent(pid), signal.SIGKILL)
    ends(managed, run)
    if managed.kind == "mpich":  # whose mpirun kills all others in that moment
        assert f"RUNNING AT {managed.hosts.addresses[host]}" in run.err
    else:
        assert f"worker 1 on {managed.hosts.names[host]} was lost: " in run.err


@pytest.mark.release
@pytest.mark.parametrize("managed", ["mpich"], indirect=True)
def test_a_worker_is_killed(managed: Site) -> None:
    run = managed.sleepers()
    pid, host = managed.worker(1)
    os.kill(pid, signal.SIGKILL)
    ends(managed, run, 137)
    assert f"worker 1 on {managed.hosts.names[host]} was killed by SIGKILL" in run.err


@pytest.mark.release
def test_what_has_started_the_agents_is_killed(managed: Site) -> None:
    run = managed.sleepers()
    name = CARRIERS[managed.kind]
    for pid in run.called(name):
        with suppress(ProcessLookupError):  # srun's second process goes with its first
            os.kill(pid, signal.SIGKILL)
    ends(managed, run, 137)
    assert f"was lost: {name} was killed by SIGKILL" in run.err


@pytest.mark.release
def test_a_host_is_cut_off(managed: Site) -> None:
    run = managed.sleepers()
    host = 1  # on the first is launch.py, if it is inside
    managed.hosts.cut(host)
    ends(managed, run)
    assert f" on {managed.hosts.names[host]} was lost: it was silent for 7.5 s" in run.err
