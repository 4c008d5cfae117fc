"""Whose turn it is: never more on its way than the window allows, the most urgent next, and nothing is forgotten."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.member.window import Lane


def test_what_fits_goes_and_the_rest_waits_for_answers():
    lane: Lane[str] = Lane(10)
    for number, name in enumerate("abc"):
        lane.add(number, 4, 0, name)
    assert lane.ready() == ["a", "b"]
    assert lane.ready() == []
    lane.answered(0)
    assert lane.ready() == ["c"]
    assert not len(lane)


def test_a_higher_priority_overtakes_what_is_not_on_its_way():
    lane: Lane[str] = Lane(1)
    for number, (name, priority) in enumerate([("last", -9), ("middle", -5), ("other middle", -5), ("first", 0)]):
        lane.add(number, 1, priority, name)
    seen = []
    for number in (3, 1, 2, 0):
        seen += lane.ready()
        lane.answered(number)
    assert seen == ["first", "middle", "other middle", "last"]


def test_something_larger_than_the_window_goes_alone():
    lane: Lane[str] = Lane(10)
    lane.add(1, 99, 0, "large")
    lane.add(2, 1, 0, "small")
    assert lane.ready() == ["large"]
    lane.answered(1)
    assert lane.ready() == ["small"]


def test_the_urgent_ones_do_not_wait_for_others():
    lane: Lane[str] = Lane(1)
    for number, name in enumerate(["a", "b1", "c", "b2"]):
        lane.add(number, 1, -number, name)
    assert lane.ready() == ["a"]
    assert lane.urgent(lambda name: name.startswith("b")) == ["b1", "b2"]
    assert lane.urgent(lambda name: name.startswith("b")) == []
    lane.answered(0)
    assert lane.ready() == [], "what was urgent is on its way too"
    lane.answered(1)
    lane.answered(3)
    assert lane.ready() == ["c"]


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-3, 3), st.booleans()), max_size=20), st.integers(0, 12))
def test_everything_goes_once(requests: list[tuple[int, int, bool]], window: int):
    lane: Lane[int] = Lane(window)
    sizes: dict[int, int] = {}
    on_way: list[int] = []
    gone: list[int] = []
    for number, (nbytes, priority, answer) in enumerate(requests):
        sizes[number] = nbytes
        lane.add(number, nbytes, priority, number)
        on_way += lane.ready()
        assert sum(sizes[one] for one in on_way) <= window or len(on_way) == 1
        if answer and on_way:
            gone.append(on_way.pop(0))
            lane.answered(gone[-1])
    while on_way or len(lane):
        on_way += lane.ready()
        gone.append(on_way.pop(0))
        lane.answered(gone[-1])
    assert sorted(gone) == sorted(sizes)
