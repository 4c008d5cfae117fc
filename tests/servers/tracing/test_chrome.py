"""The events of a trace: valid whatever is missing, on one time line, and with what a reader looks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from noted import PUSH_S, SERVER, WORKERS, NotedJob, fetched
from trace_reader import ReadTrace

from kvstore import wire
from servers.tracing.chrome import ChromeTrace, Track, TrackSpan, requests_of
from servers.tracing.collected import CollectedNotes

clocks = st.floats(-5000, 5000)


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
