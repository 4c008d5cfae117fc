"""Clocks on one time line: no message goes back in time, and nothing is wrong by more than half a round trip."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from servers.tracing.chrome import Bounds

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
