"""The events of a trace: valid whatever is missing, on one time line, and with what a reader looks for."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from noted import PUSH_S, SERVER, WORKERS, NotedJob, fetched
from trace_reader import ReadTrace

from kvstore import wire
from servers.tracing.chrome import Bounds, ChromeTrace, Track, TrackSpan, requests_of
from servers.tracing.collected import CollectedNotes

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
    assert (first["args"], last["args"]["answers"]) == (
        {"round": 1, "bytes": 400, "from": "worker 0", "request": 1},
        2,
    )
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
