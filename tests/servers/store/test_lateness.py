"""Who comes last, and is awaited alone: of a shard, with a clock that the test moves."""

from __future__ import annotations

from typing import Any

from asking import Desk, floats, updating
from hypothesis import given
from hypothesis import strategies as st

from servers.activity import Lateness
from servers.store.lateness import ArrivalTimes


class Timed:
    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.times = desk.shard.times

    def push(self, now: float, worker: int, clock: int, key: int = 1, **more: Any) -> None:
        self.times.now = now
        asker = self.desk.workers[worker]
        self.desk.ask(asker, asker.push({key: floats(1)}, clock, **more))

    def pull(self, now: float, worker: int, clock: int) -> None:
        self.times.now = now
        asker = self.desk.workers[worker]
        self.desk.ask(asker, asker.pull([1], clock))

    @property
    def alone(self) -> list[float]:
        return [round(seconds, 6) for seconds in self.times.lateness.alone_s]


def rounds(workers: int = 3, **rule: Any) -> Timed:
    return Timed(Desk(workers, values={1: floats(0), 2: floats(0)}, **rule))


# ---- rounds


def test_the_last_of_a_round_is_awaited_alone_since_the_last_but_one_came():
    timed = rounds()
    for now, worker in ((10.0, 0), (10.3, 1), (11.0, 2)):
        timed.push(now, worker, 1)
    assert timed.times.lateness.waves == 1
    assert timed.times.lateness.came_last == [0, 0, 1]
    assert timed.alone == [0.0, 0.0, 0.7]
    for now, worker in ((12.0, 2), (12.0, 1), (12.5, 0)):
        timed.push(now, worker, 2)
    assert timed.times.lateness.came_last == [1, 0, 1]
    assert timed.alone == [0.5, 0.0, 0.7]


def test_two_that_are_late_together_are_not_awaited_alone():
    timed = rounds()
    for now, worker in ((10.0, 0), (12.0, 1), (12.0, 2)):
        timed.push(now, worker, 1)
    assert timed.times.lateness.came_last == [0, 0, 1]
    assert timed.alone == [0.0, 0.0, 0.0]


def test_keys_whose_rounds_overlap_are_not_counted_twice():
    timed = rounds(2)
    for now, worker, key in ((10.0, 0, 1), (10.1, 0, 2), (10.5, 1, 1), (10.6, 1, 2)):
        timed.push(now, worker, 1, key)
    assert timed.times.lateness.waves == 2
    assert timed.alone == [0.0, 0.6]


def test_who_is_a_round_behind_is_awaited_from_the_end_of_the_round_before():
    timed = rounds(2)
    for now, worker, clock in ((10.0, 0, 1), (10.1, 0, 2), (11.0, 1, 1), (11.5, 1, 2)):
        timed.push(now, worker, clock)
    assert timed.alone == [0.0, 1.5]


def test_alone_in_the_job_nobody_is_awaited():
    timed = rounds(1)
    timed.push(10.0, 0, 1)
    timed.push(20.0, 0, 2)
    assert timed.times.lateness == Lateness(2, [2], [0.0])


def test_with_a_quorum_nobody_is_awaited_alone():
    timed = rounds(3, quorum=2)
    timed.push(10.0, 0, 1)
    timed.push(11.0, 1, 1)
    assert timed.times.lateness == Lateness(1, [0, 1, 0], [0.0, 0.0, 0.0])


def test_the_workers_of_an_aggregator_are_late_together():
    desk = Desk(4, values={1: floats(0)}, aggregated=[[0, 1], [2, 3]])
    for now, aggregator, ranks in ((10.0, 1, [2, 3]), (10.5, 0, [0, 1])):
        desk.shard.times.now = now
        asker = desk.aggregators[aggregator]
        desk.ask(asker, asker.push({1: floats(1)}, 1, ranks=ranks))
    assert desk.shard.times.lateness == Lateness(1, [1, 1, 0, 0], [0.5, 0.5, 0.0, 0.0])


# ---- each push an update


def test_with_a_staleness_only_who_is_waited_for_is_late():
    timed = Timed(updating(2, staleness=1))
    for now, worker, clock in ((10.0, 0, 1), (11.0, 1, 1), (12.0, 0, 2), (13.0, 1, 2)):
        timed.push(now, worker, clock)
        timed.pull(now, worker, clock)
    assert timed.times.lateness == Lateness(2, [0, 2], [0.0, 0.0]), "last, as somebody must be, and nobody waited"
    timed.push(14.0, 0, 3)
    timed.push(15.0, 0, 4)
    timed.pull(15.0, 0, 4)
    timed.push(17.5, 1, 3)
    assert timed.alone == [0.0, 2.5]


def test_where_two_are_behind_neither_is_awaited_alone_until_one_has_come():
    timed = Timed(updating(3, staleness=0))
    timed.push(10.0, 0, 1)
    timed.pull(10.0, 0, 1)
    timed.push(12.0, 1, 1)
    timed.push(13.0, 2, 1)
    assert timed.times.lateness.came_last == [0, 0, 1]
    assert timed.alone == [0.0, 0.0, 1.0]


def test_without_a_bound_nobody_waits():
    timed = Timed(updating(2))
    for clock in range(1, 9):
        timed.push(10.0 + clock, 0, clock, want=True)
    timed.push(50.0, 1, 1)
    assert timed.alone == [0.0, 0.0]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(0.0, 1.0)), min_size=1, max_size=40),
    st.sampled_from([None, 0, 2]),
)
def test_nobody_is_awaited_alone_for_longer_than_the_run(steps: list[tuple[int, float]], staleness: int | None):
    """Whatever the order: intervals do not overlap, and add up to no more than the time that has passed."""
    timed = rounds() if staleness is None else Timed(updating(3, staleness=staleness))
    now, pushed, waits = 0.0, [0, 0, 0], [False] * 3
    for worker, seconds in steps:
        now += seconds
        if waits[worker]:
            continue
        pushed[worker] += 1
        timed.push(now, worker, pushed[worker], want=True)
        needs = [p if staleness is None else p - staleness for p in pushed]
        waits = [needs[rank] > min(pushed) for rank in range(3)]
    lateness = timed.times.lateness
    assert sum(lateness.alone_s) <= now + 1e-6
    assert sum(lateness.came_last) == lateness.waves == min(pushed)


def test_an_account_is_for_all_ranks():
    times = ArrivalTimes(3)
    times.now = 5.0
    times.wave([2], 4.0)
    times.wave([0], None)
    assert times.lateness == Lateness(2, [1, 0, 1], [0.0, 0.0, 1.0])
