"""How long rounds that have their quorum wait for those that are late: alone, and in a store of a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from asking import Desk, Worker, floats, optimized
from pairs import Pair

from kvstore import wire
from kvstore.spec import Spec
from servers.store.grace import FEW, RECENT, Grace
from servers.store.rounds import Rounds
from servers.store.target import HeldSegments, Target

QUORUM = 2


class Played:
    """One target of four workers, whose rounds have a quorum of two and a grace."""

    def __init__(self, most_s: float = 10.0) -> None:
        self.now = 0.0
        self.grace = Grace(most_s)
        self.rounds: Rounds[int] = Rounds(range(4), quorum=QUORUM)
        self.target: Target[int] = Target(HeldSegments([1], ["k"], [Spec((1,), "float32")], [0]), self.rounds)

    def push(self, rank: int, clock: int) -> None:
        self.grace.came(self.target, [rank], clock, self.now)
        self.rounds.contribute([rank], clock, rank)

    def close(self) -> list[int] | None:
        return self.rounds.complete() if self.grace.over(self.target, self.now) else None

    def round(self, times: Mapping[int, float]) -> tuple[Any, list[int]]:
        """Let workers push to the next round so many seconds from now; return when it was closed, and with whom.

        Those that come later push, too, before this returns.
        """
        began, clock = self.now, self.rounds.version + 1
        closed: tuple[Any, list[int]] | None = None
        left = sorted((at, rank) for rank, at in times.items())
        while closed is None or left:
            wakes = [] if closed is not None or self.grace.due is None else [self.grace.due]
            self.now = min([began + at for at, _ in left[:1]] + wakes)
            self.grace.due = None
            if left and began + left[0][0] <= self.now:
                self.push(left.pop(0)[1], clock)
            contributed = self.close() if closed is None else None
            if contributed is not None:
                closed = pytest.approx(self.now - began), contributed
        return closed


# ---- by itself


def test_a_round_without_its_quorum_is_not_over() -> None:
    played = Played()
    assert played.close() is None
    played.push(0, 1)
    assert played.close() is None
    assert played.grace.due is None, "a quorum has no deadline"


def test_who_has_never_come_is_waited_for_as_long_as_the_store_allows() -> None:
    played = Played(10.0)
    assert played.round({0: 0, 1: 3}) == (13, [0, 1])


def test_a_round_that_lacks_nobody_is_over_at_once() -> None:
    played = Played()
    assert played.round({3: 0, 2: 1, 1: 2, 0: 9}) == (9, [0, 1, 2, 3])


def test_a_worker_is_waited_for_as_long_as_it_usually_takes() -> None:
    """The median of its times after the quorum, and three times their spread: here 4 + 3 * 1."""
    played = Played(20.0)
    for late in (5, 3, 4):
        assert played.round({0: 0, 1: 0, 2: 0, 3: late}) == (late, [0, 1, 2, 3])
    assert played.grace.seconds([3]) == 7
    assert played.grace.seconds([2]) == 2, "it came right after the quorum; a tenth of 20 is the least"
    assert played.grace.seconds([2, 3]) == 7, "for the last of them"
    assert played.round({0: 1, 1: 1, 2: 1, 3: 9})[0] == 8, "from the quorum on"


def test_a_worker_that_usually_takes_too_long_is_not_waited_for() -> None:
    played = Played(10.0)
    others = {0: 0.0, 1: 0.0, 2: 0.0}
    assert played.round({**others, 3: 20}) == (10, [0, 1, 2])
    for _ in range(FEW - 1):
        played.round({**others, 3: 20})
    for _ in range(3):
        assert played.round({**others, 3: 20}) == (0, [0, 1, 2]), "its late pushes have told how long it takes"


def test_a_spread_does_not_take_more_time_than_the_store_allows() -> None:
    played = Played(10.0)
    for late in (1, 9, 1, 9):
        played.round({0: 0, 1: 0, 2: 0, 3: late})
    assert played.grace.seconds([3]) == 10


def test_one_or_two_times_say_too_little() -> None:
    played = Played(10.0)
    for waits in (10, 10, 2):
        played.round({0: 0, 1: 0, 2: 0, 3: 1})
        assert played.grace.seconds([3]) == waits


def test_a_worker_that_has_become_slower_is_waited_for_again() -> None:
    played = Played(10.0)
    for late in [1] * RECENT + [4] * (RECENT // 2):
        played.round({0: 0, 1: 0, 2: 0, 3: late})
    assert played.grace.seconds([3]) == 2, "a few late pushes are few times, and no misses besides"
    played.round({0: 0, 1: 0, 2: 0, 3: 4})
    assert played.grace.seconds([3]) == 5
    assert played.round({0: 0, 1: 0, 2: 0, 3: 4.5})[1] == [0, 1, 2, 3]


def test_who_never_comes_costs_a_few_waits_and_is_waited_for_again_when_it_is_back() -> None:
    played = Played(10.0)
    for _ in range(RECENT):
        played.round({0: 0, 1: 0, 2: 0, 3: 2})
    others = {0: 0.0, 1: 0.0, 2: 0.0}
    waits = [played.round(others)[0] for _ in range(RECENT)]
    assert [wait != 0 for wait in waits] == [True] * (RECENT // 2 + 1) + [False] * (RECENT // 2)
    assert played.grace.seconds([3]) == 0
    for _ in range(RECENT):
        played.round({3: 0.0, 0: 1.0, 1: 1.0, 2: 1.0})
    assert played.grace.seconds([3]) == 10, "it has been in time since, so that nobody knows how late it may be"


def test_workers_of_one_speed_find_each_other() -> None:
    """Now one is first, now the other: that it was first says nothing of how late it is when it is not."""
    played = Played(10.0)
    for number in range(2 * RECENT):
        late = 0.1 + 0.01 * (number % 3)
        times = {0: 0.0, 1: 0.0, 2: late, 3: late} if number % 2 else {2: 0.0, 3: 0.0, 0: late, 1: late}
        assert played.round(times) == (late, [0, 1, 2, 3])
    assert played.grace.seconds([0, 1, 2, 3]) == pytest.approx(1.11)


def test_a_push_of_long_ago_tells_nothing() -> None:
    played = Played(1.0)
    for _ in range(2 * RECENT):
        played.round({0: 0, 1: 0, 2: 0})
    assert played.grace.seconds([3]) == 0
    played.now += 5
    for clock in range(1, RECENT + 1):  # of rounds whose times are forgotten
        played.push(3, clock)
    assert played.grace.seconds([3]) == 1, "it is there again, and nobody knows how late it may be"


def test_nobody_waits_for_those_that_have_no_more_to_contribute() -> None:
    played = Played(10.0)
    for rank in (0, 1, 2):
        played.push(rank, 1)
    assert played.close() is None
    played.rounds.pause(3, 0)
    assert played.close() == [0, 1, 2]
    for rank in (0, 1):
        played.push(rank, 2)
    assert played.close() is None
    played.rounds.leave([2])
    assert played.close() == [0, 1]


def test_the_earliest_of_several_waits_is_due() -> None:
    played, other = Played(10.0), Played(10.0)
    for rank in (0, 1):
        played.push(rank, 1)
        other.rounds.contribute([rank], 1, rank)
    assert not played.grace.over(played.target, 5.0)
    assert not played.grace.over(other.target, 2.0)
    assert not played.grace.over(played.target, 6.0)
    assert played.grace.due == 12


# ---- in a store


def graced(desk: type[Desk] = Desk, **rule: Any) -> Any:
    """A store of three workers whose rounds have a quorum of two and a grace of 10 s; sums are subtracted."""
    made = optimized(desk(3, values={1: floats(0)}, quorum=2, grace=10.0, **rule), lr=1.0)
    made.shard.times.now = 100.0
    return made


def push(desk: Desk, worker: Worker, value: float, clock: int = 1, now: float = 100.0, **how: Any) -> Any:
    desk.shard.times.now = now
    message = worker.push({1: floats(value)}, clock, **how)
    return message, desk.ask(worker, message)


def test_a_round_is_closed_when_its_grace_is_over() -> None:
    desk, a, b, c = graced().and_workers()
    first, _ = push(desk, a, 1)
    second, replies = push(desk, b, 3, now=101.0)
    assert replies == {}, "worker 2 may still come"
    assert desk.shard.due() == 111
    assert desk.named(desk.shard.tick(110.9)) == {}
    answers = desk.named(desk.shard.tick(111.0))
    assert answers == {(0, first.seq): wire.Ack(first.seq), (1, second.seq): wire.Ack(second.seq)}
    assert desk.value(clock=1).tolist() == [-6], "as if three had contributed the mean"
    assert desk.shard.due() is None
    late, replies = push(desk, c, 5, now=112.0)
    assert replies == {(2, late.seq): wire.Ack(late.seq, 1)}


def test_nobody_came_last_to_a_round_that_its_grace_has_ended() -> None:
    desk, a, b, _ = graced().and_workers()
    for worker in (a, b):
        push(desk, worker, 1)
    desk.shard.tick(110.0)
    push(desk, a, 1, clock=2, now=111.0)
    assert desk.shard.times.lateness.waves == 0
    push(desk, b, 1, clock=2, now=112.0)
    push(desk, desk.workers[2], 1, clock=2, now=113.0)
    assert desk.shard.times.lateness.came_last == [0, 0, 1]


def test_the_last_one_ends_the_grace() -> None:
    desk, a, b, c = graced().and_workers()
    for worker in (a, b):
        assert push(desk, worker, 1)[1] == {}
    assert len(push(desk, c, 1, now=105.0)[1]) == 3
    assert desk.value(clock=1).tolist() == [-3]
    assert desk.named(desk.shard.tick(111.0)) == {}
    assert desk.shard.due() is None, "nobody is looked for in vain"


def test_who_waits_in_the_grace_hears_for_whom() -> None:
    desk, a, b, _ = graced().and_workers()
    waiting, _ = push(desk, a, 1)
    push(desk, b, 1)
    reply = desk.reply(a, a.explain(waiting.seq))
    text = "waits for worker 2, whose push 1 of 'k1' is missing, until the grace of the round is over"
    assert (reply.text, reply.missing) == (text, [])


@pytest.mark.parametrize("how", ["join", "departure"])
def test_who_says_that_it_has_no_more_ends_the_grace(how: str) -> None:
    desk, a, b, c = graced().and_workers()
    for worker in (a, b):
        push(desk, worker, 1)
    answers = desk.ask(c, c.pause({1: 0})) if how == "join" else desk.named(desk.shard.depart([2]))
    assert [rank for rank, _ in answers] == [0, 1]


def test_a_segment_that_is_pushed_apart_meanwhile_is_not_forgotten() -> None:
    desk = Desk(3, values={1: floats(0), 2: floats(0)}, quorum=2, grace=10.0)
    _, a, b, _ = desk.and_workers()
    desk.shard.times.now = 100.0
    for worker in (a, b):
        desk.ask(worker, worker.push({1: floats(1), 2: floats(1)}))
    desk.ask(a, a.push({1: floats(1)}, 2))  # splits the bucket of both
    answered = desk.named(desk.shard.tick(110.0)) | desk.named(desk.shard.tick(120.0))
    assert [rank for rank, _ in answered] == [0, 1]


def test_a_closed_store_wishes_for_no_tick() -> None:
    desk, a, b, _ = graced().and_workers()
    for worker in (a, b):
        push(desk, worker, 1)
    for worker in desk.workers:
        desk.ask(worker, wire.Close(worker.me(), 0))
    assert desk.shard.due() is None
    assert desk.shard.tick(1000.0) == []


def test_a_standby_follows_and_begins_its_own_waits() -> None:
    pair = graced(Pair, late="keep")
    a, b, c = pair.workers
    for worker in (a, b):
        push(pair, worker, 1)
    pair.shard.tick(110.0)
    push(pair, c, 5, now=111.0)
    pair.require_same()
    assert pair.standby.due() is None
    pair.take_over()
    for worker in (a, b):
        push(pair, worker, 1, clock=2, now=200.0)
    assert pair.shard.due() == 210
    pair.shard.tick(210.0)
    assert pair.value(clock=2).tolist() == [-3 + -7], "two of 1, and the late one of 5, for three workers"
