"""Which rounds a trace has that begins while the job runs, and when it is complete."""

from __future__ import annotations

import pytest
from viewed_job import view_of, worker

from kvstore.errors import ConfigError
from kvstore.job.valid_values import RoundWindow
from servers.observer.trace_recording import are_over, notes_due_s, rounds_ahead


@pytest.mark.parametrize(
    ("wanted", "rounds"),
    [
        ((1, 20), (515, 534)),  # 10 a second, 0.4 s since the report, and a second ahead
        ((500, 600), (500, 600)),
        ((400, 600), (400, 600)),  # what is left of them
        ((501, 501), (501, 501)),
    ],
)
def test_a_number_counts_from_now_on(wanted: tuple[int, int], rounds: tuple[int, int]) -> None:
    view = view_of(
        [worker(0, before={"rounds": 400}, rounds=500), worker(1, rounds=490), worker(2, "lost", rounds=900)]
    )
    assert rounds_ahead(view, RoundWindow(*wanted)) == rounds


def test_before_the_first_round_there_is_nothing_to_count_from() -> None:
    assert rounds_ahead(view_of([]), RoundWindow(1, 20)) == (1, 20)
    assert rounds_ahead(view_of([worker(0, rounds=0)]), RoundWindow(1, 20)) == (1, 20)


def test_rounds_that_are_over_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rounds 3-9 are over: the job is in round 50;.*FILE:100"):
        rounds_ahead(view_of([worker(0, rounds=50)]), RoundWindow(3, 9))


def test_they_are_over_when_all_who_are_at_work_have_passed_them() -> None:
    rounds = RoundWindow(5, 9)
    assert not are_over(view_of([worker(0, rounds=10), worker(1, rounds=9)]), rounds)
    assert are_over(view_of([worker(0, rounds=10), worker(1, "left", rounds=9)]), rounds)
    assert are_over(view_of([worker(0, "left", rounds=3)]), rounds), "nobody is at work any more"
    assert not are_over(view_of([]), rounds), "nobody has begun"


def test_notes_come_later_where_beats_are_rare() -> None:
    assert notes_due_s(view_of([worker(0)])) == pytest.approx(2.8)
    assert notes_due_s(view_of([])) == 2.0
