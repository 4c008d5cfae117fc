"""Jobs that a program starts by a call, with real processes: what comes back, and what is raised."""

from __future__ import annotations

import asyncio
import contextlib
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import called
import numpy as np
import pytest
import torch
from launched import ROOT
from waiting import LONG

import launcher
from launcher import LaunchError, WorkerFailed

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
def test_results_come_in_the_order_of_ranks() -> None:
    results = launcher.run(called.echo, (1, "two"), {"three": [3]}, num_workers=3, num_servers=1)
    assert results == [(rank, (1, "two"), {"three": [3]}) for rank in range(3)]


@pytest.mark.usefixtures("haste")
def test_twice_in_a_row_leaves_nothing(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short))
    assert launcher.run(called.echo) == [(0, (), {})]
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
def test_a_queue_can_be_an_argument() -> None:
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    launcher.run(called.put, (queue,), num_workers=2, num_servers=1)
    assert {queue.get(), queue.get()} == {0, 1}
    queue.close()


@pytest.mark.usefixtures("haste")
def test_more_than_a_pipe_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["script.py", "x" * 300_000])
    assert launcher.run(called.length_of_argv, num_workers=2) == [300_009] * 2


@pytest.mark.usefixtures("haste")
def test_large_values_come_back_whole_and_are_nobody_elses() -> None:
    array = np.arange(6_000_000, dtype=np.float64)
    results = launcher.run(called.double, (array,), num_workers=2, num_servers=1)
    assert array[-1] == 5_999_999
    for result in results:
        assert result.flags.writeable
        np.testing.assert_array_equal(result, array * 2)


@pytest.mark.usefixtures("haste")
def test_tensors_are_not_shared() -> None:
    tensors = {"w": torch.ones(1000), "half": torch.ones(3, dtype=torch.bfloat16)}
    (result,) = launcher.run(called.double_all, (tensors,))
    for name, tensor in tensors.items():
        assert torch.equal(tensor, torch.ones_like(tensor))
        assert not tensor.is_shared()
        assert torch.equal(result[name], 2 * tensor)


@pytest.mark.usefixtures("haste")
def test_a_job_inside_a_job() -> None:
    results = launcher.run(called.nest, (2,), num_workers=2, num_servers=1)
    assert results == [(rank, [(0, (rank,), {}), (1, (rank,), {})]) for rank in (0, 1)]


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
    ("function", "how"),
    [
        (called.fail_oddly, "worker 0 raised called.Odd: moths in cupboard"),
        (called.fail_locally, "worker 0 raised called.fail_locally.<locals>.Local: here"),
    ],
)
def test_exceptions_that_cannot_travel(function: Any, how: str) -> None:
    with pytest.raises(WorkerFailed) as caught:
        launcher.run(function)
    assert str(caught.value).startswith(f"{how}\n\nTraceback (most recent call last):\n")


@pytest.mark.usefixtures("haste")
@pytest.mark.parametrize(
    ("function", "argument", "how"),
    [
        (called.leave, 7, "exited with code 7"),
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


@pytest.mark.usefixtures("haste")
def test_leaving_with_success_is_no_failure() -> None:
    assert launcher.run(called.leave, (0,)) == [None]


def test_a_server_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(tmp_path / "pid")
    called.in_haste(monkeypatch.setattr, SHOWS_PID)
    with pytest.raises(WorkerFailed) as caught:
        launcher.run(called.kill_server, (file,), env_server={"PID_FILE": file})
    assert (caught.value.process, caught.value.how) == ("server 0", "was killed by SIGKILL")


def nested() -> Any:
    return lambda: 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ((called.echo, (1, {"a": [2, threading.Lock()]})), r"cannot hand args\[1\]\['a'\]\[1\] to the workers"),
        (
            (called.echo, (), {"x": threading.Lock()}),
            r"cannot hand kwargs\['x'\] to the workers \(TypeError: cannot pickle",
        ),
    ],
)
@pytest.mark.usefixtures("haste")
def test_what_cannot_be_handed_over(call: Any, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        launcher.run(*call)


@pytest.mark.usefixtures("haste")
def test_a_result_that_cannot_be_pickled() -> None:
    with pytest.raises(
        WorkerFailed, match=r"worker 0 returned a dict that cannot be pickled: result\['threads'\]\[0\]"
    ):
        launcher.run(called.lock)


@pytest.mark.usefixtures("haste")
def test_a_result_that_cannot_be_loaded() -> None:
    with pytest.raises(WorkerFailed, match="worker 0 returned what cannot be loaded here: ImportError: no such module"):
        launcher.run(called.shy)


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
def test_in_a_running_event_loop() -> None:
    async def cell() -> Any:
        return launcher.run(called.echo, num_workers=2, num_servers=1)

    assert [rank for rank, _, _ in asyncio.run(cell())] == [0, 1]


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


@pytest.mark.long
def test_training_is_that_of_a_local_store() -> None:
    results = launcher.run(called.train, (8,), num_workers=2, num_servers=1, timeout=LONG)
    _, expected = called.train(8)
    for workers, weights in results:
        assert workers == 2
        for weight, wanted in zip(weights, expected, strict=True):
            np.testing.assert_array_equal(weight, wanted)
