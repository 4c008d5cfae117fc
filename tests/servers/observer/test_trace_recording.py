"""The recording of a trace beside a job: it goes on through errors, and ends with the job."""

from __future__ import annotations

import threading
from pathlib import Path

from noted import NotedJob, fetched
from trace_reader import ReadTrace

from kvstore.errors import NodeLost
from kvstore.wire import TraceFetched
from servers.observer.trace_recording import TraceRecording
from servers.tracing.trace_writer import TraceWriter


class Scheduler:
    """Answers at the second link that is made to it; the job is over when all has been fetched."""

    def __init__(self) -> None:
        self.job = NotedJob()
        self.job.round(1)
        self.over = threading.Event()
        self.links = 0
        self.closed = 0

    def connect(self) -> Scheduler:
        self.links += 1
        return self

    def fetch_trace(self, after: int) -> TraceFetched:
        if self.links == 1:
            raise NodeLost("nobody listens")
        if after:
            self.over.set()
        return fetched(self.job.chunks() if not after else [], after + 1)

    def close(self) -> None:
        self.closed += 1


def test_it_goes_on_with_another_link_until_the_job_is_over_and_writes_the_file(tmp_path: Path) -> None:
    scheduler, path = Scheduler(), tmp_path / "trace.json"
    recording = TraceRecording(TraceWriter(path), scheduler.connect, scheduler.over, step_s=0.001)
    recording.start()
    recording.join()
    assert (scheduler.links, scheduler.closed) == (2, 2)
    assert ReadTrace.of(path).round_trips() == 2


def test_it_records_only_if_it_is_told_a_file(tmp_path: Path) -> None:
    scheduler = Scheduler()
    assert TraceRecording.from_env({}, scheduler.connect, threading.Event) is None
    env = {"KVSTORE_TRACE_FILE": str(tmp_path / "trace.json"), "KVSTORE_TRACE": "5-9"}
    scheduler.over.set()
    recording = TraceRecording.from_env(env, scheduler.connect, lambda: scheduler.over)
    assert recording is not None
    recording.run()
    assert ReadTrace.of(tmp_path / "trace.json").about["rounds"] == "5-9"
