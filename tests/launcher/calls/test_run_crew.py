from __future__ import annotations

import io
import os
import selectors
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import called
import pytest
from agent_doubles import Heard
from waiting import until

from kvstore.job.processes import Exit
from launcher.calls.handover import Handover
from launcher.calls.outcome import Returned
from launcher.calls.run import TIME_LIMIT, Interrupts, SpawnedCrew, Streams
from launcher.job.tasks import Task
from launcher.processes.guard import Guard
from launcher.supervision.crew import CHILD, turn


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
