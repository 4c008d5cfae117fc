"""What is kept to be drawn is bounded, and says the same at each resolution."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servers.observer.watcher import MOST_COLUMNS, History, Timeline


def test_a_bucket_is_the_mean_of_what_was_measured_in_it() -> None:
    timeline = Timeline(10.0, 100)
    for at, value in ((0.0, 1.0), (9.9, 3.0), (10.0, 5.0), (31.0, 7.0)):
        timeline.add(at, {"rounds": value})
    drawing = timeline.drawing(["rounds"])
    assert list(drawing.times) == [0.0, 10.0, 30.0]
    assert list(drawing.columns["rounds"]) == [2.0, 5.0, 7.0]


def test_what_was_not_measured_is_no_number() -> None:
    timeline = Timeline(1.0, 100)
    timeline.add(0.0, {"a": 1.0})
    timeline.add(1.0, {"b": 2.0, "c": math.nan})
    timeline.add(2.0, {"a": 3.0})
    drawing = timeline.drawing(["a", "b", "c"])
    assert [math.isnan(value) for value in drawing.columns["a"]] == [False, True, False]
    assert [math.isnan(value) for value in drawing.columns["b"]] == [True, False, True]
    assert all(math.isnan(value) for value in drawing.columns["c"])


def test_the_oldest_are_forgotten() -> None:
    timeline = Timeline(1.0, 10)
    for at in range(1000):
        timeline.add(at, {"a": at})
    assert list(timeline.drawing(["a"]).columns["a"]) == list(range(989, 1000))


def test_from_the_beginning_buckets_grow_instead() -> None:
    timeline = Timeline(1.0, 16, grows=True)
    for at in range(1000):
        timeline.add(at, {"a": float(at)})
    drawing = timeline.drawing(["a"])
    assert drawing.times[0] == 0.0
    assert drawing.width_s == 64.0
    assert len(drawing.times) <= 17
    assert list(drawing.columns["a"]) == [time + 31.5 for time in drawing.times[:-1]] + [drawing.columns["a"][-1]]


@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=200), st.booleans())
def test_columns_are_as_long_as_the_times(times: list[float], grows: bool) -> None:
    timeline = Timeline(3.0, 8, grows=grows)
    for number, at in enumerate(sorted(times)):
        timeline.add(at, {f"column {number % 3}": at})
    drawing = timeline.drawing([f"column {number}" for number in range(4)])
    assert {len(column) for column in drawing.columns.values()} == {len(drawing.times)}
    assert len(drawing.times) <= 9
    assert list(drawing.times) == sorted(set(drawing.times))


def test_there_are_so_many_columns_at_most() -> None:
    history = History()
    for second in range(3):
        history.add(second, {f"column {number}": 1.0 for number in range(MOST_COLUMNS + 5)})
    assert len(history.names) == MOST_COLUMNS


@pytest.mark.parametrize("name", ["recent", "hours", "all"])
def test_a_day_is_kept_in_so_many_points(name: str) -> None:
    history = History()
    for minute in range(24 * 60):
        history.add(60.0 * minute, {"rounds": 1.0})
    drawing = history.timelines[name].drawing(["rounds"])
    assert 100 < len(drawing.times) <= 601
    assert set(drawing.columns["rounds"]) == {1.0}
