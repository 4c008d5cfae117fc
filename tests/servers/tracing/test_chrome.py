"""Traces: what is fetched, its events, its file, and whole jobs."""

from __future__ import annotations

import json
import math
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from noted import PUSH_S, SERVER, WORKERS, NotedJob, fetched
from observed_job import ObservedJob
from trace_reader import ReadTrace
from waiting import until

from kvstore import wire
from kvstore.client.dist import DistStore
from kvstore.errors import NodeLost, WireError
from kvstore.job.valid_values import RoundWindow
from kvstore.observing.figures import job_rounds_per_s
from kvstore.observing.observer_session import UNCHANGED
from kvstore.wire.tracing import ROW
from servers.observer.trace_recording import TraceRecording
from servers.tracing.chrome import Bounds, ChromeTrace, Track, TrackSpan, requests_of
from servers.tracing.collected import CollectedNotes
from servers.tracing.trace_writer import LEAST_S, MOST_S, TraceWriter

# ---- the events of a trace: valid whatever is missing, on one time line, and with what a reader looks for


clocks = st.floats(-5000, 5000)


CLOCKS = ["scheduler", "worker 0", "worker 1", "server 0"]
offsets = st.lists(st.floats(-1e4, 1e4), min_size=3, max_size=3).map(lambda made: [0.0, *made])
delays = st.floats(0, 0.5)
trips = st.lists(st.tuples(st.floats(0, 100), delays, delays), min_size=3, max_size=3)
sent = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.floats(0, 100), st.floats(0, 0.01)), max_size=40)


@given(offsets, trips, sent)
def test_the_error_is_at_most_half_a_round_trip_and_no_message_goes_back(
    ahead: list[float], beats: list[tuple[float, float, float]], messages: list[tuple[int, int, float, float]]
) -> None:
    """``ahead`` is by how much each clock is ahead of the scheduler's."""
    bounds: Bounds[str] = Bounds()
    for number, (at, there, back) in enumerate(beats, 1):
        left, came = at + ahead[number], at + there + back + ahead[number]
        bounds.measure(CLOCKS[number], "scheduler", at + there - (left + came) / 2, (came - left) / 2)
    times = [(a, b, at + ahead[a], at + took + ahead[b]) for a, b, at, took in messages]
    for a, b, left, came in times:
        bounds.message(CLOCKS[a], CLOCKS[b], left, came)
    aligned = bounds.align("scheduler")
    assert aligned.consistent
    for number, (_, there, back) in enumerate(beats, 1):
        error = abs(aligned.shifts[CLOCKS[number]] + ahead[number])
        assert error <= aligned.errors[CLOCKS[number]] + 1e-5
        assert error <= (there + back) / 2 + 1e-5
    for a, b, left, came in times:
        assert left + aligned.shifts[CLOCKS[a]] <= came + aligned.shifts[CLOCKS[b]] + 1e-5


def test_a_member_of_a_later_scheduler_is_placed_by_a_member_of_both() -> None:
    bounds: Bounds[str] = Bounds()
    bounds.measure("worker 0", "scheduler 1", 10.0, 0.5)
    bounds.measure("worker 0", "scheduler 2", -90.0, 0.25)
    bounds.measure("server 0", "scheduler 2", 0.0, 0.25)
    aligned = bounds.align("scheduler 1")
    assert {clock: round(shift, 6) for clock, shift in aligned.shifts.items()} == {
        "worker 0": 10.0,
        "scheduler 1": 0.0,
        "scheduler 2": 100.0,
        "server 0": 100.0,
    }
    assert aligned.errors["server 0"] == 1.0


def test_messages_alone_place_a_clock_too() -> None:
    bounds: Bounds[str] = Bounds()
    bounds.message("scheduler", "server 0", 5.0, 105.5)
    bounds.message("server 0", "scheduler", 106.0, 6.25)
    aligned = bounds.align("scheduler")
    assert (aligned.shifts["server 0"], aligned.errors["server 0"]) == (-100.125, 0.375)


def test_what_contradicts_itself_is_told_and_beats_count_then() -> None:
    bounds: Bounds[str] = Bounds()
    bounds.measure("server 0", "scheduler", 10.0, 0.5)
    bounds.message("scheduler", "server 0", 5.0, -20.0)
    aligned = bounds.align("scheduler")
    assert not aligned.consistent
    assert aligned.shifts["server 0"] == 10.0


def test_beats_that_contradict_themselves_leave_the_clocks_as_they_are() -> None:
    bounds: Bounds[str] = Bounds()
    bounds.measure("server 0", "scheduler", 10.0, 0.5)
    bounds.measure("server 0", "scheduler", 20.0, 0.5)
    aligned = bounds.align("scheduler")
    assert (aligned.consistent, aligned.shifts["server 0"]) == (False, 0.0)


def test_a_clock_of_which_nothing_is_known_stays_as_it_is() -> None:
    bounds: Bounds[str] = Bounds()
    bounds.add("worker 0")
    bounds.add("scheduler")
    aligned = bounds.align("scheduler")
    assert aligned.shifts == {"worker 0": 0.0, "scheduler": 0.0}
    assert aligned.errors == {"worker 0": math.inf, "scheduler": 0.0}


def read(collected: CollectedNotes) -> ReadTrace:
    made = ChromeTrace(collected, "1-100")
    return ReadTrace({"traceEvents": list(made.events()), "otherData": made.about})


def job(rounds: int = 2, ahead: dict[object, float] | None = None) -> NotedJob:
    made = NotedJob(ahead)  # type: ignore[arg-type]
    for number in range(1, rounds + 1):
        made.round(number)
    return made


@given(clocks, clocks, clocks)
def test_requests_are_handled_between_asking_and_answer_whatever_the_clocks_say(a: float, b: float, c: float) -> None:
    trace = read(job(ahead={WORKERS[0]: a, WORKERS[1]: b, SERVER: c}).collected())
    assert trace.about["clocks are consistent"]
    assert trace.round_trips() == 4
    assert all(error <= 0.5e6 for error in trace.about["clock errors in us, at most"].values())


def test_spans_are_those_of_the_members_with_what_is_known_of_them() -> None:
    trace = read(job(1).collected())
    assert sorted(trace.names.values()) == ["server 0", "worker 0", "worker 1"]
    (push,) = trace.spans("worker 0", "pushpull")
    assert (push["name"], push["args"]) == ("pushpull w and 1 more", {"round": 1, "keys": 2})
    first, last = trace.spans("server 0", "Push")
    assert first["name"] == "Push w and 1 more"
    assert (first["args"], last["args"]["answers"]) == ({"round": 1, "bytes": 400, "from": "worker 0", "request": 1}, 2)
    (update,) = trace.spans("server 0", "update")
    assert update["args"] == {"round": 1, "keys": 1, "came last": "worker 1"}
    assert update["dur"] == round(1e6 * PUSH_S, 3)


def test_an_arrow_leads_from_the_push_over_the_round_to_the_answer() -> None:
    trace = read(job(1).collected())
    names = [[trace.names[event["pid"]] for event in arrow] for arrow in trace.arrows()]
    assert names == [["worker 0", "server 0", "server 0", "worker 0"], ["worker 1", "server 0", "server 0", "worker 1"]]


def test_a_request_without_an_answer_ends_with_the_trace() -> None:
    noted = job(1)
    noted.round(2, answered=False)
    trace = read(noted.collected())
    open_ = [begin for begin, _ in trace.requests() if "answered" in begin["args"]]
    assert [begin["args"]["round"] for begin in open_] == [2, 2]
    assert trace.about["requests without an answer"] == 2
    assert trace.round_trips() == 2


def test_news_are_marks() -> None:
    noted = job(1)
    noted.mark("worker 1 was lost")
    noted.replies_without_a_request()
    trace = read(noted.collected())
    assert [event["name"] for event in trace.events if event["ph"] == "i"] == ["worker 1 was lost"]
    assert trace.spans("server 0", "replies")


@given(st.sets(st.integers(0, 3)))
def test_a_trace_is_valid_whoever_was_killed_before_it_sent_anything(silent: set[int]) -> None:
    chunks = [chunk for place, chunk in enumerate(job().chunks()) if place not in silent]
    collected = CollectedNotes()
    collected.take(fetched(chunks))
    read(collected)


def test_a_member_that_was_started_again_is_another_process_of_the_trace() -> None:
    chunks = job(1).chunks()
    again = [replace(chunk, node=chunk.node._replace(incarnation=2)) for chunk in chunks]
    collected = CollectedNotes()
    collected.take(fetched(chunks + again))
    assert "server 0, start 2" in read(collected).names.values()


def test_without_notes_the_trace_is_empty() -> None:
    assert read(CollectedNotes()).events == []


times = st.integers(0, 12).map(float)


def track(*ranges: tuple[float, float]) -> Track:
    return Track([TrackSpan(start, end, f"{start:g}-{end:g}") for start, end in ranges])


@given(st.lists(st.tuples(times, times), max_size=12))
def test_no_two_spans_overlap_in_part(ranges: list[tuple[float, float]]) -> None:
    made = track(*ranges).spans
    assert len(made) == len(ranges)
    for place, one in enumerate(made):
        assert one.start <= one.end
        for other in made[place + 1 :]:
            apart = one.end <= other.start or other.end <= one.start
            inside = (one.start <= other.start and other.end <= one.end) or (
                other.start <= one.start and one.end <= other.end
            )
            assert apart or inside, (one, other)


@given(st.lists(st.tuples(times, times), max_size=12), times)
def test_the_span_around_a_time_is_the_innermost(ranges: list[tuple[float, float]], at: float) -> None:
    made = track(*ranges)
    around = [span for span in made.spans if span.start <= at <= span.end]
    found = made.around(at)
    assert (found is None) == (not around)
    if found is not None:
        assert found in around


def test_a_span_knows_the_one_around_it() -> None:
    made = track((0, 10), (1, 4), (2, 3), (5, 6))
    outer = [made.outside(place) for place in range(4)]
    assert [None if span is None else span.name for span in outer] == [None, "0-10", "1-4", "0-10"]


def records_of(collected: CollectedNotes) -> dict[wire.Node, list[list[Any]]]:
    return {node: notes.records() for node, notes in collected.members.items()}


def test_the_notes_of_both_ends_make_one_request() -> None:
    job = NotedJob()
    job.round(1)
    found = requests_of(records_of(job.collected()))
    assert set(found) == {(WORKERS[0], 1, False), (WORKERS[1], 1, False)}
    request = found[WORKERS[0], 1, False]
    assert (request.name, request.key, request.keys, request.nbytes, request.peer) == (
        "pushpull",
        "w",
        2,
        400,
        "server 0",
    )
    assert request.asked is not None
    assert request.answered is not None
    (handled,), (left,) = request.handled, request.left
    assert (handled.node, left.node) == (SERVER, SERVER)
    times = [moment.at - request.asked.at for moment in (handled, left, request.answered)]
    assert [round(time / PUSH_S, 6) for time in times] == [1, 5, 6]


def test_one_end_alone_makes_a_request_that_lacks_the_other() -> None:
    job = NotedJob()
    job.round(1)
    worker, _, server = job.chunks()
    seen = []
    for chunk in (worker, server):
        collected = CollectedNotes()
        collected.take(fetched([chunk]))
        found = requests_of(records_of(collected))
        seen.append(
            [(request.asked is not None, len(request.handled), len(request.left)) for request in found.values()]
        )
    assert seen == [[(True, 0, 0)], [(False, 1, 1), (False, 1, 1)]]


# ---- what has been fetched: bounded, counted, and not spoilt by what is not valid


def chunks(rounds: int = 1) -> list[wire.TraceChunk]:
    job = NotedJob()
    for number in range(1, rounds + 1):
        job.round(number)
    return job.chunks()


def test_records_are_kept_by_member_and_counted() -> None:
    collected = CollectedNotes()
    assert collected.take(fetched(chunks())) == 3
    assert {node: notes.count for node, notes in collected.members.items()} == {WORKERS[0]: 3, WORKERS[1]: 3, SERVER: 4}
    assert (collected.count, collected.after) == (10, 3)


def test_a_chunk_that_comes_again_is_not_taken_twice() -> None:
    collected = CollectedNotes()
    for _ in range(2):
        collected.take(fetched(chunks()))
    assert collected.count == 10


def test_what_is_missing_is_counted_by_the_numbers() -> None:
    collected = CollectedNotes()
    job = NotedJob()
    job.round(1)
    job.chunks()  # of another trace
    job.round(2)
    collected.take(fetched(job.chunks()))
    assert collected.members[SERVER].lost == 0
    job.round(3)
    job.chunks()  # lost
    job.round(4)
    collected.take(fetched(job.chunks(), first=4, dropped=3))
    assert collected.members[SERVER].lost == 4
    assert collected.dropped == 3


def test_beyond_the_limit_records_count_as_lost() -> None:
    collected = CollectedNotes(most=9)
    collected.take(fetched(chunks()))
    assert collected.count == 6
    assert collected.members[SERVER].lost == 4


def test_records_that_are_not_valid_are_refused_when_they_are_read_and_the_rest_is_taken() -> None:
    first, second, third = chunks()
    bad = replace(second, buffers=[bytes(second.records * ROW.size)])
    collected = CollectedNotes()
    collected.take(fetched([first, bad, second, third]))
    assert (collected.refused, collected.count, collected.after) == (0, 13, 4)
    assert len(collected.members[second.node].records()) == 4
    assert (collected.refused, collected.count) == (1, 10)


def test_the_offset_that_is_wrong_by_least_stays() -> None:
    collected = CollectedNotes()
    (one, *_) = chunks()
    for number, (offset, error) in enumerate([(1.0, 0.5), (2.0, 0.25), (3.0, 0.75)], 1):
        made = replace(one, offsets=[[1, offset, error]])
        collected.take(fetched([made], first=number))
    assert collected.members[one.node].offsets == {1: (2.0, 0.25)}


def test_drops_of_a_scheduler_before_count_too() -> None:
    collected = CollectedNotes()
    collected.take(fetched(chunks(), dropped=2))
    collected.take(fetched(chunks(), first=(1 << 40) + 1, dropped=1))
    assert collected.dropped == 3


def test_other_messages_are_refused() -> None:
    with pytest.raises(WireError):
        CollectedNotes().take(wire.TraceFetched(1, 1, 0, False, [b"x", b"y"]))


# ---- the file: whole after each writing, written now and then, and once more at the end


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


# ---- traces of whole jobs in this process: what each kind of member has noted, and that the last of it is fetched


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
            time.sleep(0.005)  # else rounds by the thousand keep the processors busy until reports come

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
