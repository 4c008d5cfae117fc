"""Whose turn it is: never more on its way than the window allows, the most urgent next, and nothing is forgotten."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.member.window import Window, WindowSize


def test_what_fits_goes_and_the_rest_waits_for_answers():
    window: Window[str] = Window(WindowSize(10, 10))
    for number, name in enumerate("abc"):
        window.add(number, 4, 0, name)
    assert window.ready() == ["a", "b"]
    assert window.ready() == []
    window.answered(0)
    assert window.ready() == ["c"]
    assert not len(window)


def test_a_higher_priority_overtakes_what_is_not_on_its_way():
    window: Window[str] = Window(WindowSize(1, 1))
    for number, (name, priority) in enumerate([("last", -9), ("middle", -5), ("other middle", -5), ("first", 0)]):
        window.add(number, 1, priority, name)
    seen = []
    for number in (3, 1, 2, 0):
        seen += window.ready()
        window.answered(number)
    assert seen == ["first", "middle", "other middle", "last"]


def test_until_the_first_answer_less_may_go():
    window: Window[str] = Window(WindowSize(most=3, first=1))
    for number, name in enumerate("abcde"):
        window.add(number, 1, 0, name)
    assert window.ready() == ["a"]
    window.answered(7)
    assert window.ready() == [], "that was not the answer to one of these"
    window.answered(0)
    assert window.ready() == ["b", "c", "d"]
    for number in (1, 2, 3):
        window.answered(number)
    assert window.ready() == ["e"]
    window.add(5, 1, 0, "f")
    assert window.ready() == ["f"], "something is on its way"
    window.answered(4)
    window.answered(5)
    for number, name in enumerate("gh", 6):
        window.add(number, 1, 0, name)
    assert window.ready() == ["g"], "nothing was on its way when these came"


def test_something_larger_than_the_window_goes_alone():
    window: Window[str] = Window(WindowSize(10, 10))
    window.add(1, 99, 0, "large")
    window.add(2, 1, 0, "small")
    assert window.ready() == ["large"]
    window.answered(1)
    assert window.ready() == ["small"]


def test_the_urgent_ones_do_not_wait_for_others():
    window: Window[str] = Window(WindowSize(1, 1))
    for number, name in enumerate(["a", "b1", "c", "b2"]):
        window.add(number, 1, -number, name)
    assert window.ready() == ["a"]
    assert window.urgent(lambda name: name.startswith("b")) == ["b1", "b2"]
    assert window.urgent(lambda name: name.startswith("b")) == []
    window.answered(0)
    assert window.ready() == [], "what was urgent is on its way too"
    window.answered(1)
    window.answered(3)
    assert window.ready() == ["c"]


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-3, 3), st.booleans()), max_size=20), st.integers(0, 12))
def test_everything_goes_once(requests: list[tuple[int, int, bool]], most: int):
    window: Window[int] = Window(WindowSize(most, most))
    sizes: dict[int, int] = {}
    on_way: list[int] = []
    gone: list[int] = []
    for number, (nbytes, priority, answer) in enumerate(requests):
        sizes[number] = nbytes
        window.add(number, nbytes, priority, number)
        on_way += window.ready()
        assert sum(sizes[one] for one in on_way) <= most or len(on_way) == 1
        if answer and on_way:
            gone.append(on_way.pop(0))
            window.answered(gone[-1])
    while on_way or len(window):
        on_way += window.ready()
        gone.append(on_way.pop(0))
        window.answered(gone[-1])
    assert sorted(gone) == sorted(sizes)
