from __future__ import annotations

from kvstore import wire
from kvstore.wire.guests import MOST_EVENTS
from servers.scheduler.observing import Events


def events_of(count: int) -> Events:
    events = Events()
    for number in range(1, count + 1):
        events.add(float(number), f"event {number}")
    return events


def test_nothing_has_happened_at_first() -> None:
    assert Events().after(0) == (1, [])


def test_who_has_seen_some_is_told_the_rest() -> None:
    events = events_of(3)
    assert events.after(0) == (1, [[1.0, "event 1"], [2.0, "event 2"], [3.0, "event 3"]])
    assert events.after(2) == (3, [[3.0, "event 3"]])
    assert events.after(3) == (4, [])


def test_only_the_latest_are_kept() -> None:
    first, lines = events_of(MOST_EVENTS + 10).after(3)
    assert (first, len(lines), lines[0]) == (11, MOST_EVENTS, [11.0, "event 11"])


def test_a_long_line_is_cut_so_that_no_answer_is_refused_for_its_length() -> None:
    events = Events()
    events.add(1.0, "x" * (wire.MAX_REASON + 1))
    assert events.after(0)[1] == [[1.0, "x" * wire.MAX_REASON]]


def test_who_has_seen_those_of_another_scheduler_is_told_all() -> None:
    assert events_of(2).after(7) == (1, [[1.0, "event 1"], [2.0, "event 2"]])
