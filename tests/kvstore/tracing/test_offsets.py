"""The offsets of clocks: wrong by at most half a round trip, whatever the way takes in each direction."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.tracing.tracer import KEPT, MOST_STARTS, ClockOffsets

delays = st.floats(0, 2)


@given(st.floats(-1e5, 1e5), st.lists(st.tuples(st.floats(0, 1e4), delays, delays), min_size=1, max_size=2 * KEPT))
def test_an_offset_is_wrong_by_at_most_half_the_shortest_of_the_last_round_trips(
    offset: float, beats: list[tuple[float, float, float]]
) -> None:
    offsets = ClockOffsets()
    for sent, there, back in beats:
        offsets.take(1, sent, sent + there + back, sent + there + offset)
    ((start, found, error),) = offsets.known
    assert start == 1
    assert abs(found - offset) <= error + 1e-9
    assert error <= min(there + back for _, there, back in beats[-KEPT:]) / 2 + 1e-9


def test_a_scheduler_that_was_started_again_has_an_offset_of_its_own() -> None:
    offsets = ClockOffsets()
    offsets.take(1, 10.0, 10.2, 110.1)
    offsets.take(2, 11.0, 11.2, 5011.1)
    (first, second) = offsets.known
    assert (first[0], round(first[1], 6), second[0], round(second[1], 6)) == (1, 100.0, 2, 5000.0)


def test_the_starts_are_bounded() -> None:
    offsets = ClockOffsets()
    for start in range(1, MOST_STARTS + 5):
        offsets.take(start, 1.0, 1.0, 1.0)
    assert [known[0] for known in offsets.known] == list(range(5, MOST_STARTS + 5))


def test_an_echo_from_before_its_beat_says_nothing() -> None:
    offsets = ClockOffsets()
    offsets.take(1, 2.0, 1.0, 1.0)
    assert offsets.known == []


def test_it_has_settled_after_some_echoes_of_the_scheduler_that_is_there() -> None:
    offsets = ClockOffsets()
    assert not offsets.settled
    for _ in range(KEPT):
        offsets.take(1, 1.0, 1.0, 1.0)
    assert offsets.settled
    offsets.take(2, 1.0, 1.0, 1.0)
    assert not offsets.settled
