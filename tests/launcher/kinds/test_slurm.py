"""Jobs by Slurm: what it is told, what its words mean, and the real one, from outside and inside an allocation."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import goldens
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launched import ROOT, WAITS
from programs_of_ours import run
from sites import DRIVER, Site, place
from waiting import until

from launcher.errors import LaunchError
from launcher.job.command import program_argv
from launcher.job.description import RESERVED, Cluster, Job, OutputOptions
from launcher.kinds import slurm as kind
from launcher.kinds.slurm import QueuedJob, QueueState, follow

FULL: dict[str, Any] = {
    "job_name": "mnist",
    "queue": "gpu",
    "time": "2:00:00",
    "worker_cores": 4,
    "server_cores": 2,
    "worker_memory": "6g",
    "server_memory": "500m",
    "gpus_per_worker": 2,
    "cluster_option": ("--account=a b", "--exclusive"),
}
HOSTILE = "a 'b' \"c\" $(id) `id` \\ KVSTORE_END_OF_JOB\nKVSTORE_END_OF_JOB\n\udcff \N{SNOWMAN}"
ALLOCATION = ("--nodes=2", "--ntasks=4", "--ntasks-per-node=2")
SHOWN = "JobId=7 JobName=kvstore UserId=root(0) JobState={} Reason={} Dependency=(null) ExitCode={} RunTime=00:00:01"


def job(**cluster: Any) -> Job:
    return Job(
        2, 1, ("python train.py",), env_worker={"W": "a-secret"}, cluster=Cluster(python="/usr/bin/python3", **cluster)
    )


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    with place("slurm", request, tmp_path) as made:
        yield made


@pytest.mark.parametrize(("name", "options"), [("slurm", FULL), ("slurm-plain", {})])
def test_the_dry_run_is_as_it_was(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("kind", "slurm"):
        monkeypatch.setattr(f"launcher.kinds.{module}.source_root", lambda: None)
    monkeypatch.chdir("/")
    monkeypatch.delenv(kind.ALLOCATION, raising=False)
    text = kind.dry_run(job(**options)) + "\n"
    assert "a-secret" not in text
    goldens.same(f"{name}.sh", text)


def test_inside_an_allocation_there_is_no_sbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kind.ALLOCATION, "7")
    text = kind.dry_run(job())
    assert "sbatch" not in text
    assert "\nsrun --ntasks=3 " in text
    assert "a-secret" not in text


def test_a_percent_sign_in_the_directory_is_none_of_slurms() -> None:
    assert "--output=/a/50%%/n.out" in kind.sbatch(job(), "/a/50%", "n")
    assert "--chdir=/a/50%" in kind.sbatch(job(), "/a/50%", "n")


def test_a_job_survives_the_script(tmp_path: Path) -> None:
    """Whatever is in it: a shell reads it, and the program gets it on standard input."""
    python = tmp_path / "a python"
    python.write_text("#!/bin/sh\ncat >job\n")
    python.chmod(0o755)
    sent = Job(
        2,
        1,
        (HOSTILE, ""),
        env_server={"S": HOSTILE},
        env_worker={"W": HOSTILE},
        env_names=("P", "UNSET"),
        cluster=Cluster(python=str(python), cluster_option=("--x=y z",), worker_memory="4g"),
    )
    text = kind.script(sent, kind.job_text(sent, {"P": HOSTILE, "OTHER": "x"}, "/a b/n.end"))
    assert text.isascii()
    subprocess.run(["/bin/sh", "-s"], input=text.encode(), cwd=tmp_path, check=True)
    assert kind.job_of((tmp_path / "job").read_text()) == (sent, {"P": HOSTILE}, "/a b/n.end")


def test_a_job_that_waits_says_so_and_ctrl_c_there_cancels_it(site: Site) -> None:
    assert site.run is not None
    full = site.run("sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 99")
    prelude = "import launcher.kinds.slurm as q; q.NOTICE_S = 0.5"
    run = site.launch("-n", "1", "-s", "1", "--job-name", "waits", "python", "-c", "1", env={"PRELUDE": prelude})
    until(lambda: " is waiting: PENDING (" in run.err, "launch.py to say that it waits", over=run.over)
    run.send(signal.SIGINT)
    assert run.wait() == 130
    assert site.run("squeue", "--noheader", "--format=%i").stdout.split() == [full.stdout.strip()]
    assert not list(site.directory.glob(".kvstore*"))


@pytest.mark.release
def test_a_job_that_somebody_else_cancels_has_failed(site: Site) -> None:
    assert site.run is not None
    run = site.sleepers()
    number = run.err.split("Slurm job ")[1].split()[0]
    site.run("scancel", number)
    assert run.wait() == 143
    assert f"launch.py: Slurm job {number} ended: CANCELLED, exit code 143" in run.err
    until(lambda: not site.relics(), "everything to be gone")


def inside(site: Site, code: int) -> list[str]:
    """What launch.py is called with inside an allocation."""
    worker = f"import os, socket; print(socket.gethostname(), flush=True); raise SystemExit({code})"
    words = ["--launcher", "slurm", "-n", "3", "-s", "1", *site.words[2:], "python", "-c", worker]
    return [sys.executable, "-c", DRIVER, *words]


def test_a_script_for_sbatch_calls_launch_py_itself(site: Site) -> None:
    assert site.run is not None
    text = f"#!/bin/sh\n{shlex.join(inside(site, 0))}\necho ended $?\n"
    variables = f"--export=ALL,PYTHONPATH={Path(kind.__file__).parents[2]},FAKE_SERVER={WAITS}"
    site.run("sbatch", *ALLOCATION, "--output=out", variables, cwd=site.directory, text=text)
    out = site.directory / "out"
    until(lambda: out.exists() and "\nended " in out.read_text(), "the script to end")
    lines = out.read_text().splitlines()
    assert lines[-1] == "ended 0", lines
    assert {line.split()[-1] for line in lines if line.startswith("[worker")} == set(site.hosts.names)


@pytest.mark.release
def test_salloc_runs_launch_py_where_it_is_called(site: Site) -> None:
    assert site.run is not None
    env = [f"PYTHONPATH={Path(kind.__file__).parents[2]}", f"FAKE_SERVER={WAITS}"]
    done = site.run("env", *env, "salloc", *ALLOCATION, *inside(site, 7), cwd=site.directory)
    assert done.returncode == 7, done.stderr
    assert "exited with code 7" in done.stderr


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("JobState=PENDING Reason=Resources ExitCode=0:0", QueueState("PENDING (Resources)", False, False, 0)),
        ("JobState=PENDING Reason=None ExitCode=0:0", QueueState("PENDING", False, False, 0)),
        ("JobId=7 JobState=RUNNING Reason=None ExitCode=0:0", QueueState("RUNNING", True, False, 0)),
        ("JobState=COMPLETING Reason=None ExitCode=7:0", QueueState("COMPLETING", True, False, 0)),
        ("JobState=COMPLETED Reason=None ExitCode=0:0", QueueState("COMPLETED", False, True, 0)),
        ("JobState=FAILED Reason=NonZeroExitCode ExitCode=7:0", QueueState("FAILED (NonZeroExitCode)", False, True, 7)),
        ("JobState=FAILED Reason=x ExitCode=0:9", QueueState("FAILED (x)", False, True, 137)),
        ("JobState=CANCELLED Reason=None ExitCode=0:15", QueueState("CANCELLED", False, True, 143)),
        ("JobState=TIMEOUT Reason=TimeLimit ExitCode=0:0", QueueState("TIMEOUT (TimeLimit)", False, True, 1)),
        ("JobState=CANCELLED+ ExitCode=0:0", QueueState("CANCELLED+", False, True, 1)),
        ("JobState=FAILED ExitCode=x:y", QueueState("FAILED", False, True, 1)),
        ("JobName=JobState=FAILED JobState=RUNNING", QueueState("RUNNING", True, False, 0)),
        (SHOWN.format("NODE_FAIL", "None", "0:0"), QueueState("NODE_FAIL", False, True, 1)),
        (SHOWN.format("OUT_OF_MEMORY", "None", "0:125"), QueueState("OUT_OF_MEMORY", False, True, 1)),
        (SHOWN.format("RUNNING", "None", "0:0"), QueueState("RUNNING", True, False, 0)),
        ("nothing of the kind", QueueState("UNKNOWN", False, False, 0)),
        ("", QueueState("UNKNOWN", False, False, 0)),
    ],
)
def test_what_slurm_says_of_a_job(shown: str, expected: QueueState) -> None:
    assert kind.state(shown) == expected


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("", ""),
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[03-07,9],other1", "node03"),
        ("node[12]", "node12"),
        ("a-b[2,4]", "a-b2"),
        ("other,node[1-2]", "other"),
        ("node[1-2]-ib,x", "node1-ib"),
        ("rack[0-1]node[07-12]", "rack0node07"),
    ],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert kind.first_node(nodes) == first


BYTES = st.binary(max_size=20).filter(lambda value: 0 not in value).map(os.fsdecode)


NAMES = st.from_regex(r"[A-Z_]{1,9}", fullmatch=True).filter(lambda name: name not in RESERVED)


VARIABLES = st.dictionaries(NAMES, BYTES, max_size=3)


WORDS = st.lists(BYTES, max_size=3).map(tuple)


@settings(deadline=None)
@given(VARIABLES, VARIABLES, VARIABLES, WORDS, WORDS)
def test_a_job_of_any_bytes_arrives(
    server: dict[str, str], worker: dict[str, str], environ: dict[str, str], words: Any, options: Any
) -> None:
    cluster = Cluster(
        cluster_option=options, ssh_option=options, sync_exclude=options, time="1:00:00", encryption=False
    )
    job = Job(2, 3, ("python", *words), server, worker, (*environ, "NOT_SET"), cluster, words)
    job = replace(job, output=OutputOptions(log_dir="/d", log_files=2, show=(0, 1)))
    text = kind.job_text(job, {**environ, "OTHER": "hunter2"}, "/a\udcff/end")
    assert text.isascii()
    assert "\n" not in text
    assert "hunter2" not in text
    assert kind.job_of(text) == (job, environ, "/a\udcff/end")


@given(
    st.text(max_size=40)
    | st.sampled_from(["{}", "[]", "[{}, {}, 1]", "[1, 2, 3]", "[{}, 1]", '[{"cluster": {}}, {}, ""]'])
)
def test_what_is_no_job_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="the job on standard input cannot be read"):
        kind.job_of(text)


def test_a_job_that_makes_no_sense_is_refused() -> None:
    text = kind.job_text(Job(1, 1, ("x",)), {}, "")
    for before, after in (('"num_workers": 1', '"num_workers": 0'), ('"num_workers": 1', '"num_workers": "1"')):
        with pytest.raises(LaunchError):
            kind.job_of(text.replace(before, after))


WAITING = QueueState("PENDING (Resources)", running=False, over=False, status=0)


RUNNING = QueueState("RUNNING", running=True, over=False, status=0)


DONE = QueueState("COMPLETED", running=False, over=True, status=0)


CANCELLED = QueueState("CANCELLED", running=False, over=True, status=1)


class Manager:
    """Says one state after the other, the last for ever; a callable among them happens at its turn."""

    def __init__(self, directory: Path, states: Sequence[Any]) -> None:
        self.out, self.err, self.cancelled = directory / "out", directory / "err", directory / "cancelled"
        self.end = directory / "end"
        self.asked = 0
        self.states = list(states)
        self.interrupts: list[int] = []
        self.on_interrupt: Callable[[int], None] = lambda _: None

    def state(self) -> QueueState:
        self.asked += 1
        while callable(self.states[0]):
            self.states.pop(0)()
        found = self.states[0] if len(self.states) == 1 else self.states.pop(0)
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, QueueState)
        return CANCELLED if self.cancelled.exists() else found

    def interrupt(self, signum: int) -> None:
        self.interrupts.append(signum)
        self.on_interrupt(signum)

    def follow(self) -> int:
        cancel = ("sh", "-c", f"echo x >>{self.cancelled}")
        job = QueuedJob("Fake job 7", self.state, self.interrupt, cancel, self.out, self.err, (self.end,))
        return follow(lambda: job, ask_s=0.0)


@pytest.fixture
def manage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Manager]:
    monkeypatch.setattr(kind, "STEP_S", 0.005)
    return lambda *states: Manager(tmp_path, states)


def write(path: Path, text: str) -> Callable[[], None]:
    def append() -> None:
        with path.open("a") as file:
            file.write(text)

    return append


def send(signum: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), signum)


def test_a_queued_job_is_followed_to_its_end(
    manage: Callable[..., Manager], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    manager = manage()
    manager.states = [
        WAITING,
        WAITING,
        write(manager.out, "one\ntw"),
        RUNNING,
        write(manager.err, "oops\n"),
        write(manager.out, "o\n"),
        RUNNING,
        write(manager.out, "x" * 100_000),
        write(manager.end, "0"),
        DONE,
    ]
    assert manager.follow() == 0
    shown = capfd.readouterr()
    assert shown.out == "one\ntwo\n" + "x" * 100_000
    assert shown.err.splitlines() == ["launch.py: Fake job 7 was submitted", "oops"]
    assert list(tmp_path.iterdir()) == []


def test_its_exit_code_is_ours(manage: Callable[..., Manager], capfd: pytest.CaptureFixture[str]) -> None:
    assert manage(RUNNING, QueueState("FAILED", running=False, over=True, status=7)).follow() == 7
    assert "launch.py: Fake job 7 ended: FAILED, exit code 7" in capfd.readouterr().err


def test_a_manager_that_does_not_answer_is_asked_again(
    manage: Callable[..., Manager], capfd: pytest.CaptureFixture[str]
) -> None:
    down = [LaunchError(f"scontrol failed: {number}") for number in range(1, 13)]
    assert manage(RUNNING, *down, RUNNING, LaunchError("again"), DONE).follow() == 0
    said = [line.removeprefix("launch.py: ") for line in capfd.readouterr().err.splitlines()[1:]]
    assert said == ["scontrol failed: 1", "scontrol failed: 10", "again"]


def test_who_waits_is_told_so(
    manage: Callable[..., Manager], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "NOTICE_S", 0.0)
    assert manage(WAITING, RUNNING, DONE).follow() == 0
    assert capfd.readouterr().err.count("launch.py: Fake job 7 is waiting: PENDING (Resources)") == 1


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_job_that_runs_ends_in_order(manage: Callable[..., Manager], signum: int, capfd: Any) -> None:
    manager = manage(RUNNING, send(signum), RUNNING)
    manager.on_interrupt = lambda _: manager.states.append(CANCELLED)
    assert manager.follow() == 128 + signum
    assert manager.interrupts == [signum]
    assert not manager.cancelled.exists()


def test_one_that_waits_is_cancelled_at_once(manage: Callable[..., Manager], capfd: Any) -> None:
    manager = manage(WAITING, send(signal.SIGINT), WAITING)
    assert manager.follow() == 130
    assert manager.interrupts == []
    assert manager.cancelled.read_text() == "x\n"
    assert capfd.readouterr().err.endswith("launch.py: Ctrl-C: Fake job 7 was canceled, and has ended\n")


def test_so_is_one_that_does_not_end_in_time(
    manage: Callable[..., Manager], capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "GRACE_S", 0.0)
    manager = manage(RUNNING, send(signal.SIGTERM), RUNNING)
    assert manager.follow() == 143
    assert manager.interrupts == [signal.SIGTERM]
    assert manager.cancelled.exists()


def test_and_one_whose_user_is_in_a_hurry(manage: Callable[..., Manager], capfd: Any) -> None:
    manager = manage(RUNNING, send(signal.SIGINT), RUNNING, RUNNING, send(signal.SIGINT), RUNNING)
    assert manager.follow() == 130
    assert manager.interrupts == [signal.SIGINT]
    assert manager.cancelled.exists()


def test_a_manager_that_does_not_cancel_is_given_up(
    manage: Callable[..., Manager], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "CANCEL_S", 0.3)
    manager = manage(WAITING, send(signal.SIGINT), WAITING)
    monkeypatch.setattr(manager, "state", lambda: manager.states[0] if manager.states else WAITING)
    monkeypatch.setattr(manager, "state", lambda: (send(signal.SIGINT)(), WAITING)[1])
    assert manager.follow() == 130
    assert "gave up waiting for Fake job 7 to end; it was canceled" in capfd.readouterr().err


def test_a_cancellation_that_hangs_or_is_not_there_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kind, "STEP_S", 0.005)
    monkeypatch.setattr(kind, "CANCEL_S", 0.1)
    for cancel in (("sleep", "60"), ("/nowhere/scancel",)):
        states = iter([WAITING, "signal"])

        def ask(states: Any = states) -> QueueState:
            if next(states, "") == "signal":
                send(signal.SIGTERM)()
            return WAITING

        job = QueuedJob("Fake job 7", ask, pytest.fail, cancel, tmp_path / "out", tmp_path / "err")
        assert follow(lambda job=job: job, ask_s=0.0) == 143
        assert "gave up waiting" in capfd.readouterr().err


def test_nobody_reads_the_output_any_more(manage: Callable[..., Manager], monkeypatch: pytest.MonkeyPatch) -> None:
    read, write_end = os.pipe()
    os.close(read)
    manager = manage()
    manager.states = [RUNNING, write(manager.out, "one\n"), RUNNING, RUNNING]
    manager.on_interrupt = lambda _: manager.states.append(CANCELLED)
    before = os.dup(1)
    try:
        os.dup2(write_end, 1)
        assert manager.follow() == 128 + signal.SIGPIPE
    finally:
        os.dup2(before, 1)
        os.close(before)
        os.close(write_end)
    assert manager.interrupts == [signal.SIGPIPE]


def test_a_job_that_cannot_be_followed_is_cancelled(
    manage: Callable[..., Manager], capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = manage(RUNNING, ValueError("a bug"))
    with pytest.raises(ValueError, match="a bug"):
        manager.follow()
    assert manager.cancelled.exists()


def test_one_that_cannot_be_submitted_leaves_nothing() -> None:
    before = signal.getsignal(signal.SIGINT)

    def submit() -> QueuedJob:
        raise LaunchError("sbatch failed: invalid partition")

    with pytest.raises(LaunchError, match="invalid partition"):
        follow(submit)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_description_of_a_job_is_executed_in_our_module(shadowed: Path) -> None:
    code, _, err = run(program_argv(sys.executable, "launcher.kinds.slurm", str(ROOT)), shadowed)
    assert (code, err) == (2, "launch.py: the job on standard input cannot be read; only launch.py writes it\n")
