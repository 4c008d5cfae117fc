from __future__ import annotations

import pytest

from kvstore.checkpoint.folders import NEVER, CheckpointSchedule
from kvstore.job.valid_values import Interval


def test_rounds_are_counted_from_the_first_of_all() -> None:
    schedule = CheckpointSchedule(Interval(100), 250, 0.0)
    assert schedule.first() == 300
    assert schedule.due(300, 1.0)
    assert schedule.next(300, 1.0) == 400
    assert not schedule.due(301, 1.0)
    assert schedule.due(437, 1.0), "a meeting that came late"
    assert schedule.next(437, 1.0) == 500


@pytest.mark.parametrize("round_s", [0.001, 0.1, 3.0, 100.0])
def test_a_time_takes_few_meetings_and_is_kept_to_a_round(round_s: float) -> None:
    schedule = CheckpointSchedule(Interval(0, 60.0), 0, 0.0)
    made, meetings, meeting = [], 0, schedule.first()
    for rounds in range(1, int(600 / round_s)):
        if rounds < meeting:
            continue
        now, meetings = rounds * round_s, meetings + 1
        if schedule.due(rounds, now):
            made.append(now)
        meeting = schedule.next(rounds, now)
        if len(made) == 4:
            break
    gaps = [after - before for before, after in zip([0.0, *made], made, strict=False)]
    assert all(60 <= gap <= max(60.0, round_s) + 2 * round_s + 1e-6 for gap in gaps)
    assert meetings <= 4 * 20


def test_never() -> None:
    schedule = CheckpointSchedule(Interval(), 5, 0.0)
    assert schedule.first() == NEVER
    assert not schedule.due(NEVER, 1e9)
