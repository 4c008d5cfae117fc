"""Real jobs that are watched: status, where a worker hangs, traces, and jobs that torchrun and mpirun start."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.cookiejar import CookieJar
from pathlib import Path

import pytest
from endless import UNTIL_OVER
from jobs import Job, job
from trace_reader import ReadTrace
from waiting import LONG, PROMPT, until

from kvstore import wire
from kvstore.job.place import ObservingPlace
from kvstore.job.valid_values import RoundWindow
from kvstore.observing import status_command
from kvstore.observing.observer_session import ObserverSession
from servers.observer.trace_recording import TraceRecording
from servers.tracing.chrome import ChromeTrace
from servers.tracing.trace_writer import TraceWriter

# ---- ``kvstore-status`` beside a real job that hangs, and whose scheduler is stopped; then workers have processes of
# their own, and wait for each other


HANGS = """
    import os, pathlib, subprocess, sys, time
    import numpy as np
    import kvstore as kv

    if sys.argv[1:] == ["child"]:
        kv.create("dist_sync")
    store = kv.create("dist_sync")
    store.init(["v", "w"], [np.zeros(8)] * 2)
    store.pushpull("w", np.ones(8))
    go = pathlib.Path(__file__).with_name("go")
    if store.rank == 1:
        go.with_name("come").touch()
    while store.rank == 1 and not go.exists():
        time.sleep(0.05)  # hangs
    store.pushpull("w", np.ones(8))
    if store.rank == 0:
        print("the child ended with", subprocess.run([sys.executable, __file__, "child"]).returncode, flush=True)
    if os.fork() == 0:
        os._exit(0)
    ended = 0
    try:
        while True:
            os.wait()
            ended += 1
    except ChildProcessError:
        print("children:", ended, flush=True)
    store.barrier()
    store.pushpull("v" if store.rank == 0 else "w", np.ones(8))  # each waits for the other
"""


def line_of(script: Path, end: str) -> int:
    (found,) = (number for number, text in enumerate(script.read_text().split("\n"), 1) if text.endswith(end))
    return found


def status(running: Job, *options: str) -> tuple[int, str]:
    """What kvstore-status exits with, and prints."""
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        code = status_command.main([str(running.process.pid), *options])
    printed.seek(0)
    return code, printed.read()


@pytest.mark.long
def test_a_job_that_hangs_says_who_is_awaited_and_one_whose_workers_wait_for_each_other_ends(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    with job(tmp_path, HANGS, servers=1) as running:
        shown = ""

        def awaited() -> bool:
            nonlocal shown
            shown = status(running)[1]
            return "server 0: worker 0 has waited" in shown and "worker 1 is at" in shown

        running.until((tmp_path / "come").exists, "the hang")
        running.until(awaited, "the wait")
        assert "for worker 1, whose push 2 of 'w' is missing" in shown
        assert f"script.py:{line_of(script, '# hangs')} in <module>" in shown
        words = [sys.executable, "-m", "kvstore.observing.status_command", str(running.process.pid)]
        document = json.loads(subprocess.check_output([*words, "--json", "--stacks"]))
        assert [(wait["waiting"], wait["missing"]) for wait in document["status"]["waits"]] == [([0], [1])]
        assert {one["role"] for one in document["stacks"]} == {"worker", "server"}
        for member in document["status"]["members"]:
            assert member["pid"] in running.members(member["role"])
            assert member["host"] == socket.gethostname()
            called = Path(f"/proc/{member['pid']}/comm").read_text(encoding="ascii").strip()
            assert called == f"{member['role']}-{member['rank']}"
            assert f"  {member['pid']}\n" in shown

        (scheduler,) = running.members("scheduler")
        os.kill(scheduler, signal.SIGSTOP)
        code, late = status(running, "--timeout", "0.5")
        os.kill(scheduler, signal.SIGCONT)
        assert (code, "not answered within 0.5 s: it is stopped" in late) == (3, True)

        (tmp_path / "go").touch()
        assert running.wait() == 1, running.output
        assert not running.members()
        assert status(running)[0] == 1, "its directory is gone"
    lines = running.output.splitlines()
    told = next(line for line in lines if "kvstore.errors.ConfigError: worker 0 of this job is process" in line)
    assert told.startswith("[worker 0] ")
    assert "[worker 0] the child ended with 1" in lines
    assert {"[worker 0] children: 1", "[worker 1] children: 1"} <= set(lines)
    assert "never ends: workers 0, 1 wait for each other: worker 0 is in pushpull of 'v' at " in lines[-1]
    place = f"{script}:{line_of(script, '# each waits for the other')} in <module>"
    assert f"worker 1 is in pushpull of 'w' at {place}: server " in running.output


# ---- a worker that hangs, in whatever call: those who wait for it say at which line it is


# Worker 1 hangs in one call after the other. Worker 0 asks until it hears of that call, and then ends it.
HANGS_ANYWHERE = """
    import contextlib, ctypes, datetime, os, pathlib, signal, threading, time
    import numpy as np
    import torch.distributed
    import kvstore as kv

    FIFO = str(pathlib.Path(__file__).parent / "fifo")
    lock, beats_s = threading.Lock(), 1.0

    class Released(Exception):
        pass

    def release(*_):
        raise Released

    def byte_comes(then):
        with open(FIFO, "rb") as fifo:
            fifo.read(1)
        then()

    def in_sleep():
        with contextlib.suppress(Released):
            time.sleep(60)  # sleep

    def hold():
        lock.acquire()
        threading.Thread(target=byte_comes, args=(lock.release,)).start()  # waits, too, on a busy machine

    def in_lock():
        hold()
        with lock:  # lock
            pass

    def in_read():
        fd = os.open(FIFO, os.O_RDWR)
        os.read(fd, 1)  # read
        os.close(fd)

    def in_barrier():
        torch.distributed.barrier()  # barrier

    def in_c():
        fd = os.open(FIFO, os.O_RDWR)
        time.sleep(beats_s)  # c
        ctypes.PyDLL(None).read(fd, ctypes.create_string_buffer(1), 1)
        os.close(fd)

    def in_stop():
        time.sleep(beats_s)  # stop
        os.kill(os.getpid(), signal.SIGSTOP)

    def write(pid):
        with open(FIFO, "wb") as fifo:
            fifo.write(b"x")

    CASES = {
        "sleep": (in_sleep, "in in_sleep", lambda pid: os.kill(pid, signal.SIGUSR1)),
        "lock": (in_lock, "in in_lock", write),
        "read": (in_read, "in in_read", write),
        "barrier": (in_barrier, "in in_barrier", lambda pid: torch.distributed.barrier()),
        "c": (in_c, "keeps the interpreter's lock", write),
        "stop": (in_stop, "is stopped", lambda pid: os.kill(pid, signal.SIGCONT)),
    }
    signal.signal(signal.SIGUSR1, release)
    store = kv.create("dist_sync")
    torch.distributed.init_process_group(
        "gloo", f"file://{FIFO}-group", timeout=datetime.timedelta(seconds=60), rank=store.rank, world_size=2
    )
    pids = np.zeros(2, np.float64)
    store.init("w", pids)
    store.pushpull("w", np.eye(2)[store.rank] * os.getpid(), out=pids)
    for case, (hang, words, end) in CASES.items():
        if store.rank == 1:
            hang()
            store.pushpull("w", np.zeros(2))
            continue
        ticket, said = store.pushpull("w", np.zeros(2), wait=False), ""
        while words not in said:
            began = time.monotonic()
            try:
                ticket.wait(0.1)
            except kv.DeadlineExceeded as exc:
                said = str(exc)
        print(f"{case} after {time.monotonic() - began:.1f} s: {said}", flush=True)
        end(int(pids[1]))
        ticket.wait()
    store.barrier()
"""

# What is said of each call, of which LINE is the place. Of the last two the process beside the worker knows.
SAID = {
    "sleep": "is at LINE in in_sleep",
    "lock": "is at LINE in in_lock",
    "read": "is at LINE in in_read",
    "barrier": r"is at LINE in in_barrier, which is in torch.distributed \(torch/distributed/.*:\d+ in barrier\)",
    "c": "is in a call that keeps the interpreter's lock.*: no heartbeat for .* s; at its last beat it was at LINE .*",
    "stop": "is stopped by a signal: no sign of life for .* s; at its last beat it was at LINE .*",
}


@pytest.mark.release
def test_the_line_at_which_a_missing_worker_is_is_named_whatever_it_does(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with job(tmp_path, HANGS_ANYWHERE, servers=1) as running:
        assert running.wait() == 0, running.output
    script = tmp_path / "script.py"
    for number, (case, words) in enumerate(SAID.items(), 1):
        place = words.replace("LINE", f"{re.escape(str(script))}:{line_of(script, f'# {case}')}")
        reason = f"server 0 waits for worker 1, whose push {number + 1} of 'w' is missing"
        (said,) = re.findall(rf"^\[worker 0\] {case} (.*)$", running.output, re.MULTILINE)
        assert re.fullmatch(rf"after .* s: pushpull of 'w' .*: {reason}; worker 1 {place}", said), said


# ---- the trace of a real job, on one time line though each member has another clock; test_page.py has one more


ROUNDS = """
    import numpy as np
    import kvstore as kv

    store = kv.create("dist_sync")
    weights = [np.zeros(20000, np.float32), np.zeros(20000, np.float32)]
    store.init(["v", "w"], weights)
    for number in range(50):
        store.pushpull(["v", "w"], [np.ones(20000, np.float32)] * 2, out=weights)
"""
APART_S = 5000


@contextmanager
def apart(tmp_path: Path) -> Iterator[ObservingPlace]:
    """A job whose members have clocks ``APART_S`` seconds apart; the scheduler's is this process's."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(ROUNDS))
    root = f"ipc://{tmp_path}/s"
    around = os.environ | {
        "DMLC_NUM_WORKER": "1",
        "DMLC_NUM_SERVER": "1",
        "DMLC_PS_ROOT_URI": root,
        "KVSTORE_TRACE": "50",
        "KVSTORE_HEARTBEAT_S": "0.2",
        "KVSTORE_PULSE": "0",
    }
    roles = {"scheduler": 0, "server": APART_S, "worker": -APART_S}
    started = []
    try:
        for role, ahead in roles.items():
            words = [sys.executable, *([str(script)] if role == "worker" else ["-m", "servers"])]
            if ahead:
                words = ["unshare", "--time", "--monotonic", str(ahead), *words]
            started.append(subprocess.Popen(words, env=around | {"DMLC_ROLE": role, "DMLC_TASK_ID": "0"}))
        yield ObservingPlace(root)
        assert [process.wait(LONG) for process in started] == [0, 0, 0]
    finally:
        for process in started:
            process.kill()
            process.wait()


def need_time_namespaces() -> None:
    if os.geteuid() != 0:
        pytest.skip("clocks of their own are time namespaces, which need root")
    if shutil.which("unshare") is None:
        pytest.skip("not installed: unshare (.ci/run installs it)")
    clock = [sys.executable, "-c", "import time; print(time.monotonic())"]
    asked = ["unshare", "--time", "--monotonic", str(APART_S), *clock]
    now = subprocess.run(asked, capture_output=True, check=False, text=True)
    if now.returncode or float(now.stdout) < time.monotonic() + APART_S / 2:
        pytest.skip("this machine does not let root make time namespaces (a container without privileges?)")


@pytest.mark.release
def test_clocks_that_are_hours_apart_are_on_one_time_line(tmp_path: Path) -> None:
    need_time_namespaces()
    with ExitStack() as stack, apart(tmp_path) as place:
        writer, over = TraceWriter(tmp_path / "trace.json", RoundWindow(1, 50)), threading.Event()
        stack.enter_context(TraceRecording(writer, lambda: ObserverSession.of(place, LONG, {}), over))
    trace = ReadTrace.of(tmp_path / "trace.json")
    assert trace.round_trips() >= 50
    assert trace.about["clocks are consistent"]
    aligned = ChromeTrace(writer.notes).aligned
    for node, ahead in ((wire.Node("server", 0, 1), APART_S), (wire.Node("worker", 0, 1), -APART_S)):
        (offset, half_trip), *_ = writer.notes.members[node].offsets.values()
        error = abs(aligned.shifts[node] + ahead)
        assert error <= aligned.errors[node] + 1e-6
        assert aligned.errors[node] <= half_trip + 1e-6
        assert abs(offset + ahead) <= half_trip + 1e-6


# ---- jobs that torchrun and mpirun have started get a page and a trace while they run


ROOT = Path(__file__).resolve().parents[2]
STARTERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    "mpirun": ["mpirun.openmpi", "-n", "2", sys.executable],
}


@contextlib.contextmanager
def started(words: list[str], env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that starts a job, or looks at one; of it and the job nothing is left."""
    with log.open("w") as out:
        process = subprocess.Popen(
            words, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, text=True, process_group=0
        )
        try:
            yield process
        finally:
            process.terminate()  # mpirun then ends its ranks, which are in groups of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PROMPT)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def own() -> Iterator[Path]:
    """A directory for temporary files, whose name is so short that sockets of a job can be in it."""
    with tempfile.TemporaryDirectory(prefix="k") as name:
        yield Path(name)


@pytest.mark.long
@pytest.mark.timeout(3 * LONG)
@pytest.mark.usefixtures("none_ignored")
@pytest.mark.parametrize(
    "starter", [pytest.param("mpirun", marks=pytest.mark.release), pytest.param("torchrun", marks=pytest.mark.faults)]
)
def test_a_job_that_runs_gets_a_page_and_a_trace(starter: str, tmp_path: Path, own: Path) -> None:
    if shutil.which(STARTERS[starter][0]) is None:
        pytest.skip(f"{STARTERS[starter][0]} is not installed (.ci/run installs it)")
    (script := tmp_path / "script.py").write_text(textwrap.dedent(UNTIL_OVER))
    foreign = ("OMPI_", "PMI", "HYDRA_", "SLURM_", "TORCHELASTIC_", "MASTER_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    env |= {"TMPDIR": str(own), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DMLC_NUM_SERVER": "1"}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env |= {"OMPI_MCA_rmaps_base_oversubscribe": "1"}
    log, said, trace = tmp_path / "log", tmp_path / "said", tmp_path / "trace.json"
    with started([*STARTERS[starter], str(script)], env, log) as job:

        def of_job() -> list[Path]:
            return [place.parent for place in own.glob("*/observe.json")]

        until(lambda: bool(of_job()), "the job", over=lambda: None if job.poll() is None else log.read_text())
        status = [sys.executable, "-m", "kvstore.observing.status_command", str(of_job()[0])]
        with started([*status, "--page", "--trace", f"{trace}:5"], env, said) as observer:

            def over() -> str | None:
                return None if observer.poll() is None else said.read_text()

            until(lambda: f"{trace} has" in said.read_text(), "the trace", over=over)
            address = re.search(r"http://\S+", said.read_text())
            assert address is not None
            browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
            with browser.open(address[0], timeout=LONG) as page:
                assert b"<title>" in page.read()
            observer.send_signal(signal.SIGINT)
            assert observer.wait(PROMPT) == 130
        (tmp_path / "over").touch()
        assert job.wait(LONG) == 0, log.read_text()
    read = ReadTrace.of(trace)
    first, last = map(int, read.about["rounds"].split("-"))
    assert last == first + 4
    for worker in ("worker 0", "worker 1"):
        rounds = {span["args"]["round"] for span in read.spans(worker, "pushpull")}
        assert rounds == set(range(first, last + 1))
    assert read.about["clocks are consistent"]
