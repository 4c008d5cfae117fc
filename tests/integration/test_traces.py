"""Traces of real jobs: valid when a member is killed, and on one time line where each member has another clock."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from jobs import job
from trace_reader import ReadTrace
from waiting import LONG

from kvstore import wire
from kvstore.job.place import ObservingPlace
from kvstore.job.valid_values import RoundWindow
from kvstore.observing.observer_session import ObserverSession
from servers.observer.trace_recording import TraceRecording
from servers.tracing.chrome import ChromeTrace
from servers.tracing.trace_writer import TraceWriter

ROUNDS = """
    import numpy as np
    import kvstore as kv

    store = kv.create("dist_sync")
    weights = [np.zeros(20000, np.float32), np.zeros(20000, np.float32)]
    store.init(["v", "w"], weights)
    for number in range({rounds}):
        store.pushpull(["v", "w"], [np.ones(20000, np.float32)] * 2, out=weights)
        {then}
"""
KILL = """if store.rank == 1 and number == 30:
            import os, time
            time.sleep(0.5)
            os.kill(os.getpid(), 9)"""
APART_S = 5000


@pytest.mark.long
def test_a_trace_has_what_a_worker_did_before_it_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    script = textwrap.dedent(ROUNDS).format(rounds=100, then=KILL)
    with job(tmp_path, script, options=["--trace", f"{path}:2-60"]) as running:
        assert running.wait() == 128 + signal.SIGKILL, running.output
    trace = ReadTrace.of(path)
    assert set(trace.names.values()) == {"scheduler", "worker 0", "worker 1", "server 0", "server 1"}
    assert trace.about["rounds"] == "2-60"
    assert trace.about["records lost"] == {}
    assert {span["args"]["round"] for span in trace.spans("worker 1", "pushpull")} == set(range(2, 32))
    assert len(trace.spans("server 0", "update")) + len(trace.spans("server 1", "update")) >= 30
    assert trace.round_trips() >= 60
    assert [begin["args"]["round"] for begin, _ in trace.requests("worker 0") if "answered" in begin["args"]]
    assert any("worker 1" in event["name"] for event in trace.events if event["ph"] == "i")


@contextmanager
def apart(tmp_path: Path) -> Iterator[ObservingPlace]:
    """A job whose members have clocks ``APART_S`` seconds apart; the scheduler's is this process's."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(ROUNDS).format(rounds=50, then=""))
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
