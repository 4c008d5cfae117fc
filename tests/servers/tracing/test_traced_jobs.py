"""Traces of whole jobs in this process: what each kind of member has noted, and that the last of it is fetched."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from observed_job import ObservedJob
from trace_reader import ReadTrace
from waiting import until

from kvstore.client.dist import DistStore
from kvstore.job.valid_values import RoundWindow
from kvstore.observing.figures import job_rounds_per_s
from servers.observer.trace_recording import TraceRecording
from servers.tracing.trace_writer import TraceWriter

ROUNDS = 6


def work(store: DistStore) -> None:
    value = torch.zeros(30000)
    store.init("w", value)
    for _ in range(ROUNDS):
        with store.traced("forward"):
            gradient = torch.ones(30000)
        store.pushpull("w", gradient, out=value)
    store.report(input_s=0.001)
    store.barrier()


def traced(path: Path, window: RoundWindow, workers: int, **options: Any) -> ReadTrace:
    with ExitStack() as stack, ObservedJob(workers, trace=window, **options) as job:
        recording = TraceRecording(TraceWriter(path, window), job.observe, threading.Event(), step_s=0.02)
        stack.enter_context(recording)
        job.run(work)
    return ReadTrace.of(path)


@pytest.mark.parametrize("first", [1, 3])
def test_a_trace_has_the_rounds_that_were_asked_for(tmp_path: Path, first: int) -> None:
    trace = traced(tmp_path / "trace.json", RoundWindow(first, 4), 2)
    wanted = set(range(first, 5))
    assert {span["args"]["round"] for span in trace.spans("worker 1", "pushpull")} == wanted
    assert {span["args"]["round"] for span in trace.spans("server 0", "update")} == wanted
    assert trace.round_trips() >= 2 * len(wanted)
    assert bool(trace.spans("worker 0", "wait"))
    assert {span["args"]["round"] for span in trace.spans("worker 0", "pack")} == wanted


def test_an_aggregator_is_in_between(tmp_path: Path) -> None:
    trace = traced(tmp_path / "trace.json", RoundWindow(1, 100), 2, aggregators=1)
    assert set(trace.names.values()) == {"scheduler", "worker 0", "worker 1", "aggregator 0", "server 0"}
    assert len(trace.spans("aggregator 0", "Push")) == 2 * ROUNDS
    assert {span["args"]["from"] for span in trace.spans("server 0", "Push")} == {"aggregator 0"}
    assert trace.round_trips() >= 3 * ROUNDS
    assert trace.spans("worker 0", "input")
    assert len(trace.spans("worker 0", "forward")) == ROUNDS
    assert trace.about["records lost"] == {}


def test_a_trace_may_begin_while_the_job_runs(tmp_path: Path) -> None:
    recorded, path = threading.Event(), tmp_path / "trace.json"

    def work_on(store: DistStore) -> None:
        value = torch.zeros(30000)
        store.init("w", value)
        done = torch.zeros(1)
        store.init("done", done)
        while not done:  # both workers see it in the same round
            store.pushpull("w", torch.ones(30000), out=value)
            store.pushpull("done", torch.full((1,), float(store.rank == 0 and recorded.is_set())), out=done)

    with ObservedJob(2, heartbeat_s=0.05, aggregators=1) as job:
        recording = TraceRecording(TraceWriter(path, RoundWindow(1, 4)), job.observe, None, step_s=0.02)

        def record() -> None:
            with job.observe() as observer:
                until(lambda: bool(job_rounds_per_s(observer.look())), "reports of rounds")
            recording.run()
            recorded.set()

        thread = threading.Thread(target=record)
        thread.start()
        job.run(work_on)
        thread.join()
    trace = ReadTrace.of(path)
    first, last = map(int, trace.about["rounds"].split("-"))
    assert first > 1
    assert {span["args"]["round"] for span in trace.spans("worker 1", "pushpull")} == set(range(first, last + 1))
    assert {span["args"]["round"] for span in trace.spans("server 0", "update")} == set(range(first, last + 1))
    assert len(trace.spans("aggregator 0", "Push")) == 2 * 2 * 4
    assert trace.about["records lost"] == {}
