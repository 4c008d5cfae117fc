"""Jobs that a program starts by a call, with real processes: what comes back, and what is raised."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import multiprocessing
import os
import selectors
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import called
import numpy as np
import pytest
from agent_doubles import Heard
from launched import ROOT
from waiting import LONG, until

import launcher
from kvstore.job.processes import Exit
from launcher import LaunchError, WorkerFailed
from launcher.calls.handover import Handover
from launcher.calls.outcome import Returned
from launcher.calls.run import TIME_LIMIT, Interrupts, SpawnedCrew, Streams
from launcher.job.tasks import Task
from launcher.processes.guard import Guard
from launcher.supervision.crew import CHILD, turn

# A stand-in for a server. Its file is there whole or not at all.
SHOWS_PID = """
import os, signal
if os.environ["DMLC_ROLE"] == "server":
    file = os.environ["PID_FILE"]
    open(file + "-", "w").write(str(os.getpid()))
    os.rename(file + "-", file)
signal.pause()
"""


@pytest.fixture
def haste(monkeypatch: pytest.MonkeyPatch) -> None:
    called.in_haste(monkeypatch.setattr)


def test_import_is_quick() -> None:
    code = (
        "import sys, launcher, launcher.launch\n"
        "assert not {'torch', 'zmq', 'numpy', 'multiprocessing'}.intersection(sys.modules), sorted(sys.modules)\n"
        "assert callable(launcher.run) and launcher.run is launcher.run\n"
        "assert not {'torch', 'zmq', 'numpy'}.intersection(sys.modules), sorted(sys.modules)\n"
    )
    # Whatever measures coverage brings modules of its own.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environ)
    with pytest.raises(AttributeError, match="has no attribute 'ruin'"):
        launcher.ruin  # noqa: B018


@pytest.mark.usefixtures("haste")
def test_results_come_in_the_order_of_ranks_in_a_running_event_loop_too() -> None:
    async def cell() -> Any:
        return launcher.run(called.echo, (1, "two"), {"three": [3]}, num_workers=3, num_servers=1)

    assert asyncio.run(cell()) == [(rank, (1, "two"), {"three": [3]}) for rank in range(3)]


@pytest.mark.usefixtures("haste")
def test_twice_in_a_row_leaves_nothing(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short))
    assert launcher.run(called.echo) == [(0, (), {})]
    gc.collect()  # what earlier tests left in circles closes files, too
    before = len(list(Path("/proc/self/fd").iterdir()))
    threads = threading.active_count()
    assert launcher.run(called.echo, timeout=LONG) == [(0, (), {})]
    with pytest.raises(ValueError, match="no data"):
        launcher.run(called.fail, (0, ""))
    with pytest.raises(LaunchError):
        launcher.run(called.echo, (threading.Lock(),))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert threading.active_count() == threads
    assert not list(short.iterdir())
    assert not multiprocessing.active_children()


@pytest.mark.usefixtures("haste")
def test_the_workers_are_processes_of_multiprocessing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an environment of their own, too: nothing of a job that the caller is in."""
    for name in ("DMLC_PS_ROOT_URI", "DMLC_INTERFACE", "KVSTORE_SECRET_KEY", "KVSTORE_JOB"):
        monkeypatch.setenv(name, "outer")
    monkeypatch.setenv("KVSTORE_TIMEOUT_S", "33")
    names = ("DMLC_PS_ROOT_URI", "DMLC_INTERFACE", "KVSTORE_SECRET_KEY", "KVSTORE_TIMEOUT_S", "KVSTORE_JOB", "MINE")
    results = launcher.run(called.surroundings, names, num_workers=2, num_servers=1, env={"MINE": "a:b"})
    assert [result["name"] for result in results] == ["worker 0", "worker 1"]
    for result in results:
        env = result["env"]
        assert env.pop("DMLC_PS_ROOT_URI").startswith("ipc://")
        assert env.pop("KVSTORE_JOB").startswith(f"kvstore-{os.getuid()}-{os.getpid()}-")
        assert env == {"DMLC_INTERFACE": None, "KVSTORE_SECRET_KEY": None, "KVSTORE_TIMEOUT_S": "33", "MINE": "a:b"}
        assert result["parent"]
        assert result["method"] == multiprocessing.get_start_method()


@pytest.mark.usefixtures("haste")
def test_a_queue_can_be_an_argument_and_argv_may_be_more_than_a_pipe_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["script.py", "x" * 300_000])
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    assert launcher.run(called.put, (queue,), num_workers=2, num_servers=1) == [300_009] * 2
    assert {queue.get(), queue.get()} == {0, 1}
    queue.close()


@pytest.mark.usefixtures("haste")
def test_large_values_come_back_whole_and_are_nobody_elses() -> None:
    array = np.arange(1_000_000, dtype=np.float64)
    results = launcher.run(called.double, (array,), num_workers=2, num_servers=1)
    assert array[-1] == 999_999
    for result in results:
        assert result.flags.writeable
        np.testing.assert_array_equal(result, array * 2)


@pytest.mark.usefixtures("haste")
def test_a_job_inside_a_job() -> None:
    assert launcher.run(called.nest, (2,)) == [(0, [(0, (0,), {}), (1, (0,), {})])]


@pytest.mark.usefixtures("haste")
def test_an_exception_is_raised_here() -> None:
    with pytest.raises(ValueError, match="no data") as caught:
        launcher.run(called.fail, (1, "at all"), num_workers=3, num_servers=1)
    assert caught.value.args == ("no data", "at all")
    cause = caught.value.__cause__
    assert isinstance(cause, WorkerFailed)
    assert (cause.process, cause.how) == ("worker 1", "raised ValueError: ('no data', 'at all')")
    assert cause.details.startswith('Traceback (most recent call last):\n  File "')
    assert 'raise ValueError("no data", what)' in str(cause)
    assert "outcome.py" not in str(cause)


@pytest.mark.usefixtures("haste")
def test_who_raised_first_is_at_fault_not_who_exited_first(tmp_path: Path) -> None:
    with pytest.raises(called.Heard) as caught:
        launcher.run(called.fail_in_turn, (str(tmp_path / "heard"),), num_workers=2, num_servers=1)
    assert caught.value.__cause__.process == "worker 1"
    assert str(caught.value.__cause__).endswith("called.Heard: first\nThen worker 0 raised RuntimeError: second")


@pytest.mark.usefixtures("haste")
@pytest.mark.parametrize(
    ("function", "argument", "how"),
    [
        (called.leave, "gone", "exited with code 1"),
        (called.fail_at_exit, 9, "exited with code 9"),
        (called.vanish, 0, "exited with code 0 before vanish returned"),
        (called.die, signal.SIGKILL, "was killed by SIGKILL"),
    ],
)
def test_a_worker_that_dies(function: Any, argument: Any, how: str) -> None:
    with pytest.raises(WorkerFailed) as caught:
        launcher.run(function, (argument,))
    assert str(caught.value) == f"worker 0 {how}"


def test_a_server_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(tmp_path / "pid")
    called.in_haste(monkeypatch.setattr, SHOWS_PID)
    with pytest.raises(WorkerFailed) as caught:
        launcher.run(called.kill_server, (file,), env_server={"PID_FILE": file})
    assert (caught.value.process, caught.value.how) == ("server 0", "was killed by SIGKILL")


def test_senseless_calls() -> None:
    with pytest.raises(TypeError, match=r"run\(\) needs a function, got 3; pass its arguments"):
        launcher.run(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"one_by_one.* is a generator, .*; return a list"):
        launcher.run(called.one_by_one)
    with pytest.raises(TypeError, match=r"later.* is a coroutine function; pass one that calls asyncio\.run"):
        launcher.run(called.later)
    with pytest.raises(LaunchError, match="'2' workers are not possible; valid: 1 to 4096"):
        launcher.run(called.echo, num_workers="2")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got 'dist_async'; for one argument: args=\('dist_async',\)"):
        launcher.run(called.echo, "dist_async")
    for args, wanted in (
        (b"dist_sync", r"got b'dist_sync'; for one argument: args=\(b'dist_sync',\)"),
        (3, r"got 3; for one argument: args=\(3,\)"),
        ({"lr": 0.1}, r"got {'lr': 0.1}; for arguments by name, pass it as kwargs"),
    ):
        with pytest.raises(TypeError, match=f"args must be a list or tuple.*{wanted}"):
            launcher.run(called.echo, args)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"kwargs must be a dict of arguments by name, got \[0.1\]"):
        launcher.run(called.echo, (), [0.1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="variables must be strings, but 'DEPTH' is set to a int"):
        launcher.run(called.echo, env={"DEPTH": 3})  # type: ignore[dict-item]
    with pytest.raises(LaunchError, match="0 workers are not possible; valid: 1 to 4096"):
        launcher.run(called.echo, num_workers=0)
    with pytest.raises(LaunchError, match="cannot set DMLC_ROLE"):
        launcher.run(called.echo, env={"DMLC_ROLE": "king"})


@pytest.mark.usefixtures("haste")
def test_a_time_limit() -> None:
    with pytest.raises(TimeoutError, match=r"the job took longer than 0\.5 s"):
        launcher.run(called.sleep, timeout=0.5)


@pytest.mark.usefixtures("haste")
def test_output_goes_to_what_stands_for_standard_output() -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        launcher.run(called.speak, num_workers=2, num_servers=1)
    assert sorted(out.getvalue().splitlines()) == [f"[worker {r}] {t}" for r in (0, 1) for t in ("one", "two")]
    assert sorted(err.getvalue().splitlines()) == ["[worker 0] three", "[worker 1] three"]


@pytest.mark.usefixtures("haste")
def test_output_that_nobody_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    monkeypatch.setattr(sys, "stderr", None)
    assert launcher.run(called.speak) == [None]


@pytest.mark.usefixtures("haste")
def test_from_threads() -> None:
    """Two at once, of which one fails; their ends are noticed though there is no signal."""
    results: dict[str, Any] = {}

    def good() -> None:
        results["good"] = launcher.run(called.echo, num_workers=2, num_servers=1)

    def bad() -> None:
        try:
            launcher.run(called.fail, (0, ""), timeout=LONG)
        except ValueError as error:
            results["bad"] = error

    threads = [threading.Thread(target=good), threading.Thread(target=bad)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert [rank for rank, _, _ in results["good"]] == [0, 1]
    assert results["bad"].args == ("no data", "")


@pytest.mark.release
def test_training_is_that_of_a_local_store() -> None:
    results = launcher.run(called.train, (8,), num_workers=2, num_servers=1, timeout=LONG)
    _, expected = called.train(8)
    for workers, weights in results:
        assert workers == 2
        for weight, wanted in zip(weights, expected, strict=True):
            np.testing.assert_array_equal(weight, wanted)


def tasks(guard: Guard) -> dict[int, Task]:
    name, _, mark = guard.mark.partition("=")
    env = {name: mark, "PATH": os.defpath, "PYTHONPATH": os.pathsep.join(sys.path)}
    server = Task("server", 0, ("sh", "-c", "echo a server"), env)
    workers = [Task("worker", rank, ("never executed",), {**env, "DMLC_TASK_ID": str(rank)}) for rank in (0, 1)]
    return dict(enumerate([server, *workers]))


def test_workers_make_the_call_and_servers_run_what_their_tasks_say(guard: Guard) -> None:
    handover = Handover(called.rank, (), {}, 2)
    crew, sink = SpawnedCrew(handover, tasks(guard), guard), Heard()
    with selectors.DefaultSelector() as selector:
        crew.start(selector, sink)
        # Nobody collects: the crew notices by itself that a process has ended.
        until(lambda: turn(selector, 0.05) and len(sink.exits) == 3, step=0)
        assert sorted(sink.exits, key=lambda end: end[0]) == [(index, Exit()) for index in range(3)]
        assert ("output", 0, 1, b"a server\n") in sink.events
        assert [handover.outcome(rank) for rank in (0, 1)] == [Returned(0), Returned(1)]
        crew.close()
        assert not selector.get_map()
    handover.close()


def test_a_worker_that_never_reads_is_no_obstacle(guard: Guard) -> None:
    handover = Handover(called.rank, (bytes(1 << 20),), {}, 2)
    for start in handover.starts:
        start.argv = ("sh", "-c", "exit 7")
    crew, sink = SpawnedCrew(handover, tasks(guard), guard), Heard()
    with selectors.DefaultSelector() as selector:
        crew.start(selector, sink)
        until(lambda: turn(selector, 0.05) and len(sink.exits) == 3, step=0)
        assert dict(sink.exits) == {0: Exit(), 1: Exit(code=7), 2: Exit(code=7)}
        crew.close()
    handover.close()


def taken(interrupts: Interrupts) -> list[int]:
    with selectors.DefaultSelector() as selector:
        selector.register(interrupts, selectors.EVENT_READ)
        assert selector.select(60)
        return interrupts.take()


def test_the_first_signal_is_remembered_and_a_childs_end_is_none() -> None:
    with Interrupts(None) as interrupts:
        os.kill(os.getpid(), CHILD)
        assert taken(interrupts) == [CHILD]
        assert interrupts.first is None
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert taken(interrupts) == [signal.SIGTERM, signal.SIGINT]
    assert interrupts.first == signal.SIGTERM


def test_a_time_limit_comes_as_a_signal_does() -> None:
    with Interrupts(0.01) as interrupts:
        assert taken(interrupts) == [TIME_LIMIT]
    assert interrupts.first == TIME_LIMIT


def test_a_limit_that_is_not_reached_leaves_no_thread() -> None:
    before = threading.active_count()
    with Interrupts(600.0):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_elsewhere_than_in_the_main_thread_handlers_stay_and_children_may_always_have_ended() -> None:
    seen: list[object] = []

    def elsewhere() -> None:
        before = signal.getsignal(signal.SIGTERM)
        with Interrupts(0.01) as interrupts:
            seen.append(signal.getsignal(signal.SIGTERM) is before)
            seen.append(taken(interrupts))
            seen.append(interrupts.take())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(60)
    assert seen == [True, [TIME_LIMIT, CHILD], [CHILD]]


class Flaky(io.StringIO):
    def write(self, _text: str) -> int:
        raise RuntimeError("the kernel has gone")


def replace(monkeypatch: pytest.MonkeyPatch, stdout: Any = None) -> tuple[Any, io.StringIO]:
    """Put streams in the place of standard output and error. Not a fixture: pytest does so too, before each test."""
    streams = io.StringIO() if stdout is None else stdout, io.StringIO()
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    return streams


def test_a_stream_that_has_been_put_in_place_is_written_to_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = replace(monkeypatch)
    outlet = Streams()
    outlet.put(outlet.stdout, b"[worker 0] one\n")
    outlet.put(outlet.stderr, b"[worker 0] \xff\n")
    outlet.put(outlet.stdout, b"")
    assert [stream.getvalue() for stream in replaced] == ["[worker 0] one\n", "[worker 0] \ufffd\n"]
    assert (outlet.pending, outlet.waits_for, outlet.broken) == (0, None, {})
    outlet.pump()


def test_one_that_fails_is_broken_and_the_other_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    _, stderr = replace(monkeypatch, Flaky())
    outlet = Streams()
    outlet.put(outlet.stdout, b"lost\n")
    outlet.put(outlet.stdout, b"lost too\n")
    outlet.put(outlet.stderr, b"kept\n")
    assert list(outlet.broken) == [outlet.stdout]
    assert "the kernel has gone" in str(outlet.broken[outlet.stdout])
    assert stderr.getvalue() == "kept\n"


def test_a_flush_that_fails_counts_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    stream: Any = io.StringIO()
    stream.flush = lambda: (_ for _ in ()).throw(OSError(5, "gone"))
    monkeypatch.setattr(sys, "stdout", stream)
    outlet = Streams()
    outlet.put(outlet.stdout, b"x\n")
    outlet.pump()
    assert list(outlet.broken) == [outlet.stdout]


def test_no_stream_at_all_takes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    outlet = Streams()
    outlet.put(outlet.stdout, b"x\n")
    outlet.pump()
    assert outlet.broken == {}


def test_the_callers_own_lines_come_first_where_both_go_to_the_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "out").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        monkeypatch.setattr(sys, "__stdout__", file)
        print("the caller's")
        before = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            outlet = Streams()
            assert outlet.stdout == 1
            outlet.put(1, b"the job's\n")
            outlet.pump()
        finally:
            os.dup2(before, 1)
            os.close(before)
    assert (tmp_path / "out").read_text() == "the caller's\nthe job's\n"
