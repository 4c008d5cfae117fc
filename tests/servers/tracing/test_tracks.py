"""Spans of one thread: each lies beside or inside others, whatever was noted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from servers.tracing.chrome import Track, TrackSpan

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
