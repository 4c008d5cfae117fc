"""Chunks of a trace in the scheduler: kept until an observer has them, and never too many."""

from __future__ import annotations

from kvstore import wire
from kvstore.wire.tracing import MOST_CHUNKS
from servers.scheduler.traces import ATTENTIVE_S, FIRST_S, Traces

OBSERVER = wire.Node("observer", 0, 5)


def chunk(number: int, role: str = "worker", over: bool = False, size: int = 10) -> wire.TraceChunk:
    return wire.TraceChunk(wire.Node(role, number, 1), [], [], over, 1, 0, [bytes(size)])


def fetch(traces: Traces, after: int, now: float = 0.0) -> tuple[int, list[int], int, bool]:
    """Return the number of the first chunk, the ranks in the chunks, how many were dropped, and if there are more."""
    fetched = wire.decode(wire.encode(traces.fetch(wire.FetchTrace(wire.Sender(OBSERVER, 1, 1), after), now)))
    return fetched.first, [made.node.rank for made in fetched.chunks], fetched.dropped, fetched.more


def test_chunks_stay_until_the_observer_says_that_it_has_them() -> None:
    traces = Traces(0.0)
    for number in range(3):
        traces.take(chunk(number))
    assert fetch(traces, 0) == fetch(traces, 0) == (1, [0, 1, 2], 0, False)
    traces.take(chunk(3))
    assert fetch(traces, 3) == (4, [3], 0, False)
    assert fetch(traces, 4) == (5, [], 0, False)


def test_beyond_the_limit_the_oldest_are_forgotten_and_counted() -> None:
    traces = Traces(0.0, most=3000)
    for number in range(5):
        traces.take(chunk(number, size=1000))
    assert fetch(traces, 0) == (4, [3, 4], 3, False)


def test_an_answer_has_a_bounded_number_of_chunks() -> None:
    traces = Traces(0.0)
    for _ in range(MOST_CHUNKS + 1):
        traces.take(chunk(0))
    first, ranks, _, more = fetch(traces, 0)
    assert (first, len(ranks), more) == (1, MOST_CHUNKS, True)
    assert fetch(traces, MOST_CHUNKS) == (MOST_CHUNKS + 1, [0], 0, False)


def test_the_chunks_of_a_later_start_have_later_numbers() -> None:
    before, after = Traces(0.0, start=1), Traces(0.0, start=2)
    for traces in (before, after):
        traces.take(chunk(0))
    first, *_ = fetch(before, 0)
    assert fetch(after, first)[1] == [0]


def test_it_waits_for_an_observer_that_has_asked_lately_or_may_still_come() -> None:
    traces = Traces(100.0)
    assert not traces.awaited(100.0)
    traces.take(chunk(0))
    assert traces.awaited(100.0 + FIRST_S - 1)
    assert not traces.awaited(100.0 + FIRST_S)
    fetch(traces, 0, now=200.0)
    assert traces.awaited(200.0)
    assert not traces.awaited(200.0 + ATTENTIVE_S)
    fetch(traces, 1, now=300.0)
    assert not traces.awaited(300.0)


def test_it_follows_the_workers_window() -> None:
    traces = Traces(0.0)
    opened = [traces.open]
    for made in (chunk(0, "server"), chunk(0), chunk(1, over=True), chunk(0, "server")):
        traces.take(made)
        opened.append(traces.open)
    assert opened == [None, None, True, False, False]
