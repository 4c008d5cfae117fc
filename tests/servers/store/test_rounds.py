from __future__ import annotations

import pytest
import torch
from asking import Desk, floats, read, updating
from hypothesis import given
from hypothesis import strategies as st

from kvstore import wire
from servers.store.rounds import Rounds, WorkerClocks


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
    desk = Desk(4, values={1: floats(0)}, quorum=3)
    a, b, c, d = desk.workers
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
    desk = Desk(3, values={1: floats(0)}, quorum=2, late="keep")
    a, b, c = desk.workers
    for worker in (a, b):
        desk.ask(worker, worker.push({1: floats(1)}, 1))
    assert desk.reply(c, c.push({1: floats(10)}, 1)) == wire.Ack(c.seq, 1)
    for worker in (a, b):
        desk.ask(worker, worker.push({1: floats(1)}, 2))
    assert desk.value(clock=2) == 12, "three contributions of three workers"


def test_a_worker_that_is_behind_goes_on_from_where_the_others_are() -> None:
    desk = Desk(2, values={1: floats(0)}, quorum=1)
    fast, slow = desk.workers
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
    desk = Desk(4, values={1: floats(0)}, quorum=3, aggregated=[[0, 1], [2, 3]])
    host, other = desk.aggregators
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
    desk = updating(2, staleness=1)
    fast, slow = desk.workers
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
    desk = updating(2, staleness=0)
    fast, slow = desk.workers
    waiting = fast.push({1: floats(1)}, 1, want=True)
    assert desk.reply(fast, waiting) is None
    assert set(desk.ask(slow, slow.push({1: floats(1)}, 1, want=True))) == {(0, waiting.seq), (1, slow.seq)}

    desk = updating(2)
    for clock in range(1, 9):
        reply = desk.reply(desk.workers[0], desk.workers[0].push({1: floats(1)}, clock, want=True))
        assert reply.ahead == clock


def test_a_worker_that_has_left_holds_nobody_up() -> None:
    desk = updating(3, staleness=0)
    one, two, _ = desk.workers
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
