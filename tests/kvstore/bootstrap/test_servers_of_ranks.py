"""The servers that rank 0 has started: which ones, with which variables, and how all of them end."""

from __future__ import annotations

import io
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from waiting import LONG

from kvstore import wire
from kvstore.bootstrap import server_supervisor
from kvstore.bootstrap.job import start_aggregator, start_servers
from kvstore.bootstrap.report import tell
from kvstore.bootstrap.server_supervisor import (
    MemberEnd,
    MemberProcesses,
    ServerSupervisor,
    SupervisedJob,
    SupervisedProcess,
    root_cause,
)
from kvstore.errors import JOB_FAILED_EXIT, ConfigError
from kvstore.job.config import Config
from kvstore.job.exit_report import ExitReport
from kvstore.job.place import FILE, ObservingPlace
from kvstore.job.ranks import FAMILIES, Ranks
from kvstore.job.system import cores
from kvstore.job.threads import WAITING
from kvstore.transport import Transport
from kvstore.transport.choose import links

# ---- what rank 0 has its supervisor start: which processes, with which variables and sockets


SECRET = "0123456789abcdef0123456789abcdef"
TORCH, OPENMPI, *_ = FAMILIES


class Pipe(io.BytesIO):
    """Keeps what was written when it is closed."""

    told = b""

    def close(self) -> None:
        self.told = self.getvalue()
        super().close()


class Supervisor:
    """Stands for the supervisor's process, and keeps what it was told."""

    def __init__(self, _words: Any, **options: Any) -> None:
        self.options = options
        self.stdin = Pipe()
        self.ended: list[str] = []

    def wait(self, _timeout: float | None = None) -> int:
        self.ended.append("waited for")
        return 0


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Supervisor]:
    supervisors: list[Supervisor] = []

    def start(words: Any, **options: Any) -> Supervisor:
        supervisors.append(Supervisor(words, **options))
        return supervisors[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    return supervisors


def job_of(supervisor: Supervisor) -> SupervisedJob:
    return SupervisedJob.loads(supervisor.stdin.told.decode())


def test_on_one_host_they_meet_in_a_private_directory_which_goes_with_the_job(started: list[Supervisor]) -> None:
    address, processes = start_servers(Config(), Ranks(TORCH, 0, 4, 0, 4), True, "", Path("/run/meeting"))
    job = job_of(started[0])
    private = Path(address.uri.removeprefix("ipc://")).parent
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert job.remove == [str(private), "/run/meeting"]
    assert (job.parent, job.root_fd, started[0].options["pass_fds"]) == (os.getpid(), -1, ())
    assert [process.name for process in job.members] == ["scheduler", "server 0", "server 1"]
    place = ObservingPlace.read(private / FILE)
    assert (place.address, place.key, place.launcher, place.workers) == (address.uri, "", "torchrun", 4)
    for process in job.members:
        assert process.variables["DMLC_PS_ROOT_URI"] == address.uri
        assert process.variables["DMLC_NUM_WORKER"] == "4"
        assert process.argv[-2:] == ["servers", process.name.replace(" ", "-")]
    assert [process.variables.get("KVSTORE_LOCAL_RANK") for process in job.members] == [None, "0", "1"]
    processes.end()
    processes.end()
    assert not private.exists()
    assert started[0].ended == ["waited for"], "the shell between this process and the supervisor"


def test_across_hosts_the_scheduler_inherits_a_listening_socket_and_all_have_keys(started: list[Supervisor]) -> None:
    config = Config(node_host="127.0.0.1", num_servers=1)
    address, processes = start_servers(config, Ranks(TORCH, 0, 2, master="127.0.0.1", port=1), False, SECRET)
    job = job_of(started[0])
    scheduler, server = job.members
    assert (address.uri, address.servers) == ("127.0.0.1", 1)
    assert address.port > 0
    assert scheduler.variables["KVSTORE_ROOT_FD"] == str(job.root_fd)
    assert started[0].options["pass_fds"] == (job.root_fd,)
    assert "KVSTORE_ROOT_FD" not in server.variables
    assert scheduler.variables["KVSTORE_SECRET_KEY"] != server.variables["KVSTORE_SECRET_KEY"]
    assert scheduler.variables["KVSTORE_MEMBER_KEYS"] == server.variables["KVSTORE_MEMBER_KEYS"]
    assert SECRET not in started[0].stdin.told.decode()
    place = ObservingPlace.read(Path(job.directory) / FILE)
    observer = place.config({}).keys
    assert observer is not None
    assert observer.public == scheduler.variables["KVSTORE_OBSERVER_KEY"]
    assert observer.root == scheduler.variables["KVSTORE_ROOT_KEY"]
    assert place.key not in started[0].stdin.told.decode()
    processes.end()


@pytest.mark.parametrize(("ranks", "wanted", "count"), [(1, 0, 1), (2, 0, 2), (8, 0, 2), (1, 3, 3)])
def test_there_are_two_servers_at_most_if_nobody_says_how_many(
    started: list[Supervisor], ranks: int, wanted: int, count: int
) -> None:
    address, processes = start_servers(Config(num_servers=wanted), Ranks(TORCH, 0, ranks, 0, ranks), True, "")
    assert address.servers == count == len(job_of(started[0]).members) - 1
    processes.end()


def test_the_aggregator_of_rank_0s_host_is_started_with_the_servers(started: list[Supervisor]) -> None:
    config = Config(node_host="127.0.0.1", num_servers=2)
    ranks = Ranks(OPENMPI, 0, 5, 0, 2, master="127.0.0.1", port=1)
    address, processes = start_servers(config, ranks, False, SECRET, aggregated=[[0, 2], [1, 3]])
    job = job_of(started[0])
    assert [process.name for process in job.members] == ["scheduler", "server 0", "server 1", "aggregator 0"]
    scheduler, _, _, aggregator = (process.variables for process in job.members)
    assert scheduler["KVSTORE_NUM_AGGREGATORS"] == aggregator["KVSTORE_NUM_AGGREGATORS"] == "2"
    assert (aggregator["KVSTORE_LOCAL_RANK"], aggregator["KVSTORE_LOCAL_SIZE"]) == ("0", "1")
    assert job.reporter == scheduler
    assert len(set(scheduler["KVSTORE_MEMBER_KEYS"].split(","))) == 1 + 2 + 2 + 5
    own = Config.from_env(aggregator).keys
    assert own is not None
    assert own.public in scheduler["KVSTORE_MEMBER_KEYS"].split(",")
    processes.end()
    elsewhere = start_aggregator(Config(), address, replace(ranks, rank=1), SECRET)
    assert elsewhere is not None
    job = job_of(started[1])
    assert [process.name for process in job.members] == ["aggregator 1"]
    assert job.rank == 1
    assert job.reporter["KVSTORE_SECRET_KEY"] == scheduler["KVSTORE_SECRET_KEY"], "which may report on any other"
    assert "DMLC_NODE_HOST" not in job.members[0].variables
    assert SECRET not in started[1].stdin.told.decode()
    elsewhere.end()
    assert not Path(job.directory).exists()
    assert start_aggregator(Config(), address, replace(ranks, rank=2), SECRET) is None


def test_servers_share_the_cores_and_do_not_spin_unless_the_user_wants_it(
    started: list[Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*WAITING, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    names = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS")
    for given, expected in (({}, ("passive", str(max(1, cores() // 2)))), (dict.fromkeys(names, "7"), (None, None))):
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        _, processes = start_servers(Config(num_servers=2), Ranks(TORCH, 0, 1, 0, 1), True, "")
        scheduler, *both = job_of(started[-1]).members
        assert {tuple(map(server.variables.get, names)) for server in both} == {expected}
        assert not set(names) & set(scheduler.variables)
        processes.end()


def test_without_room_for_a_directory_the_error_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(ConfigError, match="set TMPDIR to a writable directory"):
        start_servers(Config(), Ranks(TORCH, 0, 1, 0, 1), True, "")


# ---- rank 0's supervisor: starts the scheduler and servers, reports one that fails, and ends all with rank 0


FOREVER = "import time; time.sleep(1000)"


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """The supervisor takes SIGTERM, in its own process."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def process(role: str, rank: int, code: str) -> SupervisedProcess:
    return SupervisedProcess(role, rank, [sys.executable, "-S", "-c", code], {"WHO": f"{role}-{rank}"})


def supervise(
    processes: Sequence[SupervisedProcess],
    *,
    parent: int | None = None,
    rank: int = 0,
    directory: Path = Path("/nowhere"),
    remove: Sequence[Path] = (),
    patience_s: float = LONG,
) -> tuple[int, list[tuple[str, int, str]]]:
    reports: list[tuple[str, int, str]] = []
    parent = os.getppid() if parent is None else parent
    job = SupervisedJob(parent, rank, list(processes), {}, str(directory), list(map(str, remove)), -1, patience_s)
    code = ServerSupervisor(job, lambda *report: reports.append(report)).run()
    return code, reports


def test_orders_survive_the_pipe_and_show_no_keys() -> None:
    secret = {"KVSTORE_SECRET_KEY": "hush"}
    server = SupervisedProcess("server", 1, ["python"], secret)
    job = SupervisedJob(7, 0, [server], secret, "/tmp/x", ["/tmp/x"], 5, 3.0)
    assert SupervisedJob.loads(job.dumps()) == job
    assert "hush" not in repr(job)


def test_when_all_have_ended_in_order_it_ends_and_removes_what_is_the_jobs(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "socket").touch()
    (tmp_path / "meeting").touch()
    mark = tmp_path / "mark"
    server = process("server", 0, f"import os; open({str(mark)!r}, 'w').write(os.environ['WHO'])")
    remove = [tmp_path / "job", tmp_path / "meeting", tmp_path / "never was"]
    assert supervise([process("scheduler", 0, "pass"), server], remove=remove) == (0, [])
    assert list(tmp_path.iterdir()) == [mark]
    assert mark.read_text() == "server-0"


@pytest.mark.parametrize(
    ("code", "how"),
    [("raise SystemExit(7)", "exited with code 7"), ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL")],
)
def test_one_that_fails_is_reported_and_the_others_have_time_to_end(
    code: str, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    scheduler, failing = process("scheduler", 0, "import time; time.sleep(0.3)"), process("server", 1, code)
    assert supervise([scheduler, failing]) == (1, [("server", 1, how)])
    assert capfd.readouterr().err == f"server 1 {how}\n"


def test_who_does_not_end_in_time_is_killed() -> None:
    stays = process("scheduler", 0, FOREVER)
    assert supervise([stays, process("server", 0, "raise SystemExit(7)")], patience_s=0.1)[0] == 1


def test_who_ends_because_the_job_has_failed_is_not_to_blame() -> None:
    assert supervise([process("server", 0, f"raise SystemExit({JOB_FAILED_EXIT})")]) == (0, [])


@pytest.mark.parametrize(("role", "rank"), [("scheduler", 0), ("aggregator", 2)])
def test_when_the_ranks_process_is_gone_all_are_ended(monkeypatch: pytest.MonkeyPatch, role: str, rank: int) -> None:
    monkeypatch.setattr(server_supervisor, "LAST_WORDS_S", 0.1)
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait()
    expected = (1, [("worker", rank, "ended without leaving the job; torchrun, mpirun or srun may say why")])
    assert supervise([process(role, 0, FOREVER)], parent=gone.pid, rank=rank) == expected


HAND_OVER = """
import os, sys, time
from kvstore.job.exit_report import ExitReport, hand_over
error, details, consequence, code = sys.argv[1:]
shown = hand_over(ExitReport(error, details=details, consequence=consequence == "yes"), os.environ)
print(os.environ["WHO"], "is quiet" if shown else "says it itself", flush=True)
time.sleep(1000 if code == "never" else 0)
raise SystemExit(int(code))
"""


def reporting(role: str, error: str, *, details: str = "", consequence: bool, code: int | None) -> SupervisedProcess:
    told = [error, details, "yes" if consequence else "no", "never" if code is None else str(code)]
    variables = {"WHO": role, "PYTHONPATH": os.pathsep.join(sys.path)}
    return SupervisedProcess(role, 0, [sys.executable, "-S", "-c", HAND_OVER, *told], variables)


def test_the_root_cause_is_said_once_and_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server_supervisor, "HEARD_S", LONG)  # however long the second takes to start
    error = "worker 1 failed: ValueError: no data"
    ending = [reporting(role, error, consequence=True, code=JOB_FAILED_EXIT) for role in ("scheduler", "server")]
    assert supervise(ending, directory=tmp_path) == (0, [])
    *before, last = capfd.readouterr().err.splitlines()
    assert sorted(before) == ["scheduler is quiet", "server is quiet"]
    assert last == "the job has failed: worker 1 failed: ValueError: no data"


def test_the_root_cause_does_not_wait_for_those_that_do_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server_supervisor, "HEARD_S", 0.0)
    stays = process("scheduler", 0, FOREVER)
    fails = reporting("server", "OSError: no room", details="where\nOSError: no room\n", consequence=False, code=1)
    assert supervise([stays, fails], directory=tmp_path, patience_s=1.0)[0] == 1
    said = "server is quiet\nserver 0 (has failed|exited with code 1):\nwhere\nOSError: no room\n"
    assert re.fullmatch(said, capfd.readouterr().err)


def test_an_aggregators_supervisor_tells_of_its_own_failure_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """That of others is told where the scheduler is."""
    consequence = reporting("aggregator", "worker 3 was killed", consequence=True, code=JOB_FAILED_EXIT)
    assert supervise([consequence], directory=tmp_path) == (0, [])
    assert capfd.readouterr().err == "aggregator is quiet\n"
    killed = process("aggregator", 1, "import os; os.kill(os.getpid(), 9)")
    assert supervise([killed], directory=tmp_path) == (1, [("aggregator", 1, "was killed by SIGKILL")])
    assert capfd.readouterr().err == "aggregator 1 was killed by SIGKILL\n"


HEARD = ExitReport("worker 1 failed: ValueError: no data", consequence=True)


def end(name: str, report: ExitReport | None = None, *, how: str = "", blameless: bool = True) -> MemberEnd:
    return MemberEnd(name, how, report, blameless)


def test_a_job_that_has_not_failed_needs_no_words() -> None:
    assert root_cause([]) == root_cause([end("server 0"), end("scheduler")]) == ""


def test_what_the_scheduler_has_heard_is_the_cause() -> None:
    late = ExitReport("the scheduler has not answered", consequence=True)
    ends = [end("server 0", late), end("scheduler", HEARD), end("server 1", HEARD)]
    assert root_cause(ends) == "the job has failed: worker 1 failed: ValueError: no data"
    assert root_cause(ends[2:]) == ""  # on another host


def test_ctrl_c_needs_no_words() -> None:
    assert root_cause([end("scheduler", ExitReport("worker 1 failed: KeyboardInterrupt", consequence=True))]) == ""


def test_who_fails_by_itself_is_the_cause() -> None:
    killed = end("server 1", how="was killed by SIGKILL", blameless=False)
    later = end("server 0", how="exited with code 1", blameless=False)
    assert root_cause([end("scheduler", HEARD), killed, later]) == "server 1 was killed by SIGKILL"


def test_a_traceback_is_shown_with_the_process_that_it_is_of() -> None:
    report = ExitReport("OSError: no room", details="Traceback:\nOSError: no room\n")
    fails = end("server 1", report, how="exited with code 1", blameless=False)
    assert root_cause([fails]) == "server 1 exited with code 1:\nTraceback:\nOSError: no room"


def test_who_has_printed_its_traceback_is_named_with_the_error() -> None:
    fails = end("server 1", ExitReport("OSError: no room", printed=True), how="exited with code 1", blameless=False)
    assert root_cause([fails]) == "server 1 exited with code 1:\nOSError: no room"


def test_who_ends_by_an_error_about_another_is_not_the_cause() -> None:
    fails = end("server 0", HEARD, how="exited with code 1", blameless=False)
    assert root_cause([fails, end("scheduler", HEARD)]) == "the job has failed: worker 1 failed: ValueError: no data"


def test_who_has_failed_and_still_runs_is_the_cause_of_what_others_have_heard() -> None:
    fails = MemberEnd.expected("server 1", ExitReport("OSError: no room", details="OSError: no room\n"))
    others = [MemberEnd.expected("scheduler", HEARD), end("server 0", HEARD)]
    assert root_cause([*others, fails]) == "server 1 has failed:\nOSError: no room"
    assert root_cause(others) == "the job has failed: worker 1 failed: ValueError: no data"


AGGREGATOR = SupervisedProcess("aggregator", 1, ["python"], {})


DEAF = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(1000)
"""


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor's process that ends only when it is killed."""
    monkeypatch.setattr(server_supervisor, "words", lambda python, _module: (python, "-S", "-c", DEAF))
    monkeypatch.setattr(server_supervisor, "END_S", 0.1)


def children() -> list[str]:
    return [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


def made(directory: Path) -> MemberProcesses:
    directory.mkdir()
    return MemberProcesses(Config(), 3, [AGGREGATOR], {}, str(directory))


def test_a_supervisor_that_cannot_be_started_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_words: Any, **_options: Any) -> Any:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(OSError, match="temporarily unavailable"):
        made(tmp_path / "job")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("deaf")
def test_a_supervisor_is_nobodys_child_and_one_that_does_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, pid = children(), os.getpid()
    processes = made(tmp_path / "job")
    assert children() == before
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    processes.wait()  # a fork of the rank has nobody to wait for
    monkeypatch.undo()
    assert (tmp_path / "job").exists()
    processes.end()
    processes.end()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    tmp_path.chmod(0o700)
    return {"DMLC_PS_ROOT_URI": f"ipc://{tmp_path}/scheduler"}


def hear(scheduler: Transport, *lost: wire.Lost) -> threading.Thread:

    def answer() -> None:
        for expected in lost:
            heard.append(wire.decode((scheduler.recv(LONG) or (b"", []))[1]))
            assert heard[-1] == expected
            peer, frames = scheduler.recv(LONG) or (b"", [])
            scheduler.send(peer, wire.encode(wire.Explanation(wire.decode(frames).seq, "")))

    heard: list[Any] = []
    thread = threading.Thread(target=answer)
    thread.start()
    return thread


@pytest.mark.parametrize("transport", ["sockets", "zeromq"])
def test_the_scheduler_hears_who_has_ended_and_how(env: dict[str, str], transport: str) -> None:
    env["KVSTORE_TRANSPORT"] = transport
    long = "x" * (wire.MAX_REASON + 1)
    scheduler = links(Config.from_env(env))()
    try:
        scheduler.bind(env["DMLC_PS_ROOT_URI"])
        cut = wire.Lost("server", 1, long[: wire.MAX_REASON], 2, final=True)
        thread = hear(scheduler, wire.Lost("worker", 3, "exited with code 7"), cut)
        assert tell(env, "worker", 3, "exited with code 7")
        assert tell(env, "server", 1, long, 2, final=True)
        thread.join(LONG)
    finally:
        scheduler.close()


def test_a_scheduler_that_is_being_started_again_has_not_heard(env: dict[str, str]) -> None:
    assert not tell(env, "worker", 3, "exited with code 7")


def test_of_the_schedulers_own_end_nobody_is_told() -> None:
    assert not tell({"DMLC_PS_ROOT_URI": "ipc:///nowhere/scheduler"}, "scheduler", 0, "exited with code 7")
