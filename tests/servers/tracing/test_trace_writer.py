"""The file: whole after each writing, written now and then, and once more at the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from noted import NotedJob, fetched
from trace_reader import ReadTrace

from kvstore import wire
from kvstore.errors import NodeLost
from kvstore.job.valid_values import RoundWindow
from kvstore.observing.observer_session import UNCHANGED
from servers.tracing.trace_writer import LEAST_S, MOST_S, TraceWriter


class Source:
    def __init__(self) -> None:
        self.job = NotedJob()
        self.number = 1

    def fetch_trace(self, after: int, rounds: RoundWindow = UNCHANGED) -> wire.TraceFetched:
        chunks = self.job.chunks() if after == self.number - 1 else []
        answer = fetched(chunks, self.number)
        self.number += len(chunks)
        return answer


def test_the_file_is_written_when_there_is_news_and_it_is_time(tmp_path: Path) -> None:
    path, source, now = tmp_path / "trace.json", Source(), [0.0]
    writer = TraceWriter(path, RoundWindow(1, 9), lambda: now[0])
    writer.step(source)
    assert json.loads(path.read_text())["traceEvents"] == []
    rounds = []
    for number in range(1, 5):
        source.job.round(number)
        now[0] += 0.6 * LEAST_S
        writer.step(source)
        rounds.append(len(ReadTrace.of(path).spans("server 0", "update")))
    assert rounds == [0, 2, 2, 4]


def test_the_more_there_is_to_write_the_more_rarely_it_is_written(tmp_path: Path) -> None:
    path, source, now = tmp_path / "trace.json", Source(), [0.0]
    writer = TraceWriter(path, RoundWindow(1, 99), lambda: now[0])
    for number in range(1, 61):
        source.job.round(number)
    for _ in range(12):
        writer.step(source)
        now[0] += 1.0
    written = ReadTrace.of(path)
    assert len(written.spans("server 0", "update")) == 60
    for number in range(61, 81):
        source.job.round(number)
    now[0] += LEAST_S
    writer.step(source)
    assert ReadTrace.of(path).about == written.about
    now[0] += MOST_S
    writer.step(source)
    assert len(ReadTrace.of(path).spans("server 0", "update")) == 80


def test_the_last_writing_has_all_even_if_the_scheduler_is_gone(tmp_path: Path) -> None:
    path, source = tmp_path / "trace.json", Source()
    writer = TraceWriter(path, RoundWindow(1, 9), lambda: 0.0)
    source.job.round(1)
    writer.step(source)
    source.job.round(2)
    writer.step(source)
    writer.finish()
    trace = ReadTrace.of(path)
    assert trace.round_trips() == 4
    assert trace.about["rounds"] == "1-9"


def test_a_scheduler_that_does_not_answer_is_the_callers_affair(tmp_path: Path) -> None:
    class Gone:
        def fetch_trace(self, after: int, rounds: RoundWindow = UNCHANGED) -> wire.TraceFetched:
            raise NodeLost("nobody listens")

    with pytest.raises(NodeLost):
        TraceWriter(tmp_path / "trace.json").step(Gone())


def test_a_file_that_cannot_be_written_does_not_end_the_observer(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "gone" / "trace.json")
    writer.step(Source())
    writer.finish()
