"""Traces of whole jobs in this process: what each kind of member has noted, and that the last of it is fetched."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from observed_job import ObservedJob
from trace_reader import ReadTrace

from kvstore.dist.store import DistStore
from kvstore.job.valid_values import RoundWindow
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
    over = threading.Event()
    writer = TraceWriter(path, str(window))
    with ObservedJob(workers, trace=window, **options) as job:
        recording = TraceRecording(writer, job.observe, over, step_s=0.02)
        recording.start()
        job.run(work)
    over.set()
    recording.join()
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
