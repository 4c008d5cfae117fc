"""Rounds, and who comes last to one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from asking import Desk, floats, read, updating
from hypothesis import given
from hypothesis import strategies as st

from kvstore import wire
from servers.activity import Lateness
from servers.store.lateness import ArrivalTimes
from servers.store.rounds import Rounds, WorkerClocks

# ---- rounds


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int]]]:
    """Workers, rounds, and all their contributions in any order, some of them twice or more."""
    workers, rounds = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    once = [(rank, clock) for rank in range(workers) for clock in range(1, rounds + 1)]
    return workers, rounds, draw(st.permutations(once + draw(st.lists(st.sampled_from(once), max_size=6))))


@given(arrivals())
def test_any_interleaving_completes_every_round_once_in_order_and_by_rank(case):
    workers, count, order = case
    rounds: Rounds[tuple[int, int]] = Rounds(range(workers))
    completed, seen = [], set()
    for rank, clock in order:
        assert rounds.contribute([rank], clock, (rank, clock)) is ((rank, clock) not in seen)
        seen.add((rank, clock))
        while (items := rounds.complete()) is not None:
            completed.append(items)
            assert rounds.version == len(completed)
    assert completed == [[(rank, clock) for rank in range(workers)] for clock in range(1, count + 1)]
    assert rounds.missing(count) == {}


@given(arrivals(), st.data())
def test_missing_is_the_first_round_that_lacks_each_worker(case, data):
    workers, count, order = case
    rounds: Rounds[None] = Rounds(range(workers))
    seen = set()
    for rank, clock in order[: data.draw(st.integers(0, len(order)))]:
        rounds.contribute([rank], clock, None)
        seen.add((rank, clock))
        while rounds.complete() is not None:
            pass
    wanted = data.draw(st.integers(0, count + 2))
    expected = {}
    for rank in range(workers):
        lacking = [clock for clock in range(1, wanted + 1) if (rank, clock) not in seen]
        if lacking:
            expected[rank] = lacking[0]
    assert rounds.missing(wanted) == expected


def test_a_duplicate_does_not_replace_what_came_first():
    rounds: Rounds[str] = Rounds([0, 1])
    assert rounds.contribute([0], 1, "first")
    assert not rounds.contribute([0], 1, "second")
    rounds.contribute([1], 1, "other")
    assert rounds.complete() == ["first", "other"]
    assert not rounds.contribute([0], 1, "late")
    assert rounds.complete() is None


def test_a_sum_counts_for_all_its_workers_and_stands_where_the_first_of_them_stands():
    rounds: Rounds[str] = Rounds(range(5))
    assert rounds.contribute([2, 4], 1, "two and four")
    assert not rounds.expects([3, 4], 1)
    assert not rounds.contribute([3, 4], 1, "four again"), "a part of it would count twice"
    assert rounds.missing(1) == {0: 1, 1: 1, 3: 1}
    assert rounds.contribute([3], 1, "three")
    assert not rounds.contribute([0, 1, 5], 1, "a stranger")
    assert rounds.contribute([0, 1], 1, "zero and one")
    assert [(ranks, item) for _, ranks, item in rounds.open()] == [
        ([2, 4], "two and four"),
        ([3], "three"),
        ([0, 1], "zero and one"),
    ]
    assert rounds.complete() == ["zero and one", "two and four", "three"]
    assert rounds.share == 5


def test_a_quorum_is_of_workers_whatever_number_of_contributions_they_come_in():
    rounds: Rounds[str] = Rounds(range(4), quorum=3, keep=True)
    rounds.contribute([0, 1], 1, "early")
    assert rounds.complete() is None
    rounds.contribute([3], 1, "third")
    assert rounds.complete() == ["early", "third"]
    assert not rounds.contribute([2], 1, "late")
    assert rounds.open() == [(1, [2], "late")]
    rounds.contribute([0, 1, 2], 2, "sum")
    assert rounds.complete() == ["sum", "late"]


def test_a_sum_of_which_one_worker_has_paused_before_is_not_taken():
    rounds: Rounds[str] = Rounds(range(3))
    rounds.pause(1, 1)
    assert not rounds.expects([0, 1], 2)
    assert not rounds.contribute([0, 1], 2, "too many")
    assert rounds.contribute([0, 1], 1, "its last")
    assert rounds.contribute([0, 2], 2, "without it")
    assert rounds.contribute([2], 1, "other")
    assert rounds.complete() == ["its last", "other"]
    assert rounds.complete() == ["without it"]
    assert rounds.share == 2


def test_a_round_does_not_overtake_the_one_before_it():
    rounds: Rounds[int] = Rounds([0, 1])
    for rank in (0, 1):
        rounds.contribute([rank], 2, rank)
    assert rounds.complete() is None
    for rank in (1, 0):
        rounds.contribute([rank], 1, 10 + rank)
    assert rounds.complete() == [10, 11]
    assert rounds.complete() == [0, 1]


def test_a_stranger_contributes_nothing():
    rounds: Rounds[int] = Rounds([0])
    assert not rounds.contribute([1], 1, 1)
    assert rounds.complete() is None


def test_what_is_missing_for_a_distant_round_is_known_at_once():
    rounds: Rounds[int] = Rounds([0, 1])
    rounds.contribute([0], 1, 0)
    assert rounds.missing(2**61) == {0: 2, 1: 1}


def test_a_copy_does_without_whom_the_original_does_without() -> None:
    rounds: Rounds[int] = Rounds(range(3), quorum=3)
    rounds.leave([2])
    copied = rounds.copy()
    for rank in (0, 1):
        assert copied.contribute([rank], 1, rank)
    assert copied.missing(1) == {}
    assert copied.complete() == [0, 1]


def test_a_round_is_over_when_enough_are_there_and_stands_for_all() -> None:
    desk, a, b, c, d = Desk(4, values={1: floats(0)}, quorum=3).and_workers()
    assert desk.ask(a, a.push({1: floats(1)})) == {}
    waiting = b.push({1: floats(2)}, want=True)
    assert desk.reply(b, waiting) is None
    replies = desk.ask(c, c.push({1: floats(3)}))
    assert read(desk, replies[1, waiting.seq]) == 6 * 4 / 3
    assert replies[1, waiting.seq].clocks == [1]
    late = desk.reply(d, d.push({1: floats(100)}, want=True))
    assert read(desk, late) == 8
    assert (late.missed, late.clocks) == (1, [1])


def test_late_contributions_may_count_in_the_next_round() -> None:
    desk, a, b, c = Desk(3, values={1: floats(0)}, quorum=2, late="keep").and_workers()
    for worker in (a, b):
        desk.ask(worker, worker.push({1: floats(1)}, 1))
    assert desk.reply(c, c.push({1: floats(10)}, 1)) == wire.Ack(c.seq, 1)
    for worker in (a, b):
        desk.ask(worker, worker.push({1: floats(1)}, 2))
    assert desk.value(clock=2) == 12, "three contributions of three workers"


def test_a_worker_that_is_behind_goes_on_from_where_the_others_are() -> None:
    desk, fast, slow = Desk(2, values={1: floats(0)}, quorum=1).and_workers()
    for clock in (1, 2, 3):
        desk.ask(fast, fast.push({1: floats(1)}, clock))
    reply = desk.reply(slow, slow.pull([1], 0))
    assert reply.clocks == [3]
    assert desk.reply(slow, slow.push({1: floats(5)}, 4)) == wire.Ack(slow.seq)
    assert desk.value(clock=4) == 10


def test_workers_that_have_left_are_done_without() -> None:
    desk = Desk(3, values={1: floats(0)}, quorum=2)
    desk.shard.depart([0])
    worker = desk.workers[1]
    waiting = worker.push({1: floats(1)}, want=True)
    assert desk.reply(worker, waiting) is None
    replies = desk.named(desk.shard.depart([0, 2]))
    assert read(desk, replies[1, waiting.seq]) == 3
    assert read(desk, desk.reply(worker, worker.push({1: floats(2)}, 2, want=True))) == 6


def test_the_sum_of_a_host_weighs_as_much_as_its_workers_in_a_quorum() -> None:
    desk, host, other = Desk(4, values={1: floats(0)}, quorum=3, aggregated=[[0, 1], [2, 3]]).and_aggregators()
    assert desk.ask(host, host.push({1: floats(3)}, ranks=[0, 1])) == {}
    waiting = other.push({1: floats(3)}, ranks=[3], want=True)
    replies = desk.ask(other, waiting)
    assert len(replies) == 2
    assert read(desk, replies[other.name, waiting.seq]) == 6 * 4 / 3
    late = desk.reply(other, other.push({1: floats(100)}, ranks=[2], want=True))
    assert read(desk, late) == 8
    assert (late.missed, late.clocks) == (1, [1])


def test_integers_are_not_scaled() -> None:
    desk = Desk(3, values={1: torch.tensor([0])}, quorum=2)
    for worker in desk.workers[:2]:
        desk.ask(worker, worker.push({1: torch.tensor([1])}))
    assert desk.value(clock=1) == 2


@given(st.permutations([(rank, clock) for rank in range(3) for clock in range(1, 5)]), st.integers(1, 3))
def test_rounds_with_a_quorum_are_over_in_order_and_lose_nothing_that_is_kept(
    order: list[tuple[int, int]], quorum: int
) -> None:
    rounds: Rounds[tuple[int, int]] = Rounds(range(3), quorum=quorum, keep=True)
    seen: list[tuple[int, int]] = []
    over = 0
    for rank, clock in order:
        rounds.contribute([rank], clock, (rank, clock))
        while (items := rounds.complete()) is not None:
            over += 1
            assert rounds.version == over
            assert len([item for item in items if item[1] == over]) >= quorum
            seen += items
    left = [item for _, _, item in rounds.open()]
    assert sorted(seen + left) == sorted(order)


def test_rounds_that_another_server_has_closed_may_be_skipped() -> None:
    rounds: Rounds[str] = Rounds([0, 1])
    rounds.pause(0, 3)
    rounds.reach(4)
    assert rounds.version == 4
    assert rounds.counts([0, 1], 4)
    assert rounds.contribute([1], 5, "b")
    assert rounds.complete() == ["b"], "0 has paused before that"
    rounds.reach(5)
    with pytest.raises(ValueError, match="round 4 was closed after round 5"):
        rounds.reach(4)


def test_a_read_waits_for_the_slowest_worker() -> None:
    desk, fast, slow = updating(2, staleness=1).and_workers()
    assert desk.reply(fast, fast.push({1: floats(1)}, 1)) == wire.Ack(fast.seq)
    assert read(desk, desk.reply(fast, fast.pull([1], 1))) == -1
    assert desk.reply(fast, fast.push({1: floats(1)}, 2)) == wire.Ack(fast.seq), "a push never waits"
    waiting = fast.pull([1], 2)
    assert desk.reply(fast, waiting) is None
    assert (
        "worker 1, whose push 1 of 'k1' is missing"
        in desk.shard.handle(fast.peer, fast.explain(waiting.seq))[0][1].text
    )
    replies = desk.ask(slow, slow.push({1: floats(1)}, 1))
    assert read(desk, replies[0, waiting.seq]) == -3
    assert replies[0, waiting.seq].ahead == 1
    assert replies[1, slow.seq] == wire.Ack(slow.seq)


def test_no_staleness_is_lockstep_and_no_bound_is_none() -> None:
    desk, fast, slow = updating(2, staleness=0).and_workers()
    waiting = fast.push({1: floats(1)}, 1, want=True)
    assert desk.reply(fast, waiting) is None
    assert set(desk.ask(slow, slow.push({1: floats(1)}, 1, want=True))) == {(0, waiting.seq), (1, slow.seq)}

    desk = updating(2)
    for clock in range(1, 9):
        reply = desk.reply(desk.workers[0], desk.workers[0].push({1: floats(1)}, clock, want=True))
        assert reply.ahead == clock


def test_a_worker_that_has_left_holds_nobody_up() -> None:
    desk, one, two, _ = updating(3, staleness=0).and_workers()
    waiting = one.push({1: floats(1)}, 1, want=True)
    assert desk.reply(one, waiting) is None
    assert desk.shard.depart([2]) == []
    replies = desk.ask(two, two.push({1: floats(1)}, 1, want=True))
    assert set(replies) == {(0, waiting.seq), (1, two.seq)}
    waiting = one.push({1: floats(1)}, 2, want=True)
    assert desk.reply(one, waiting) is None
    assert set(desk.named(desk.shard.depart([1, 2]))) == {(0, waiting.seq)}


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(0, 4))
def test_nobody_who_reads_is_farther_ahead_than_the_bound(order: list[int], bound: int) -> None:
    """Workers push and then read; whoever waits does nothing until it is answered."""
    desk = updating(3, staleness=bound)
    clocks, waiting = [0, 0, 0], {}
    for rank in order:
        worker = desk.workers[rank]
        if rank in waiting:
            continue
        clocks[rank] += 1
        request = worker.push({1: floats(1)}, clocks[rank], want=True)
        waiting[rank] = request.seq
        for (who, seq), reply in desk.ask(worker, request).items():
            assert waiting.pop(who) == seq
            assert reply.ahead == clocks[who] - min(clocks) <= bound
            assert read(desk, reply) == -sum(clocks), "every update is in, at once"
    assert all(clocks[rank] - min(clocks) > bound for rank in waiting)


def test_clocks_go_along_when_buckets_are_taken_apart_and_put_together() -> None:
    desk = Desk(2, "async", values={1: floats(0), 2: floats(0)}, staleness=0)
    for worker in reversed(desk.workers):
        desk.ask(worker, worker.set_optimizer("sgd", lr=1.0))
    a, b = desk.workers
    desk.ask(a, a.push({1: floats(1), 2: floats(1)}, 1))
    desk.ask(a, a.push({2: floats(1)}, 2))
    waiting = a.pull([1], 1)
    assert desk.reply(a, waiting) is None
    replies = desk.ask(b, b.push({1: floats(1), 2: floats(1)}, 1))
    assert read(desk, replies[0, waiting.seq]) == -2
    assert desk.reply(b, b.pull([2], 1)) is not None
    assert desk.reply(a, a.pull([2], 2)) is None


def test_clocks_have_the_interface_of_rounds() -> None:
    clocks: WorkerClocks[None] = WorkerClocks([0, 1])
    assert clocks.contribute([0], 2, None)
    assert not clocks.contribute([0], 1, None), "an older push has been counted"
    assert (clocks.version, clocks.missing(2)) == (0, {1: 1})
    copied = clocks.copy()
    assert copied.contribute([1], 3, None)
    assert (clocks.version, copied.version) == (0, 2)
    assert clocks.state != copied.state
    assert (clocks.open(), clocks.complete()) == ([], None)


# ---- who comes last, and is awaited alone: of a shard, with a clock that the test moves


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
    st.lists(st.tuples(st.integers(0, 2), st.floats(0.0, 1.0)), min_size=1, max_size=40), st.sampled_from([None, 0, 2])
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
