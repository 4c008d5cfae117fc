"""Bounded staleness, quorums and delay compensation, as a shard keeps them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from asking import Desk, Worker, floats, text_of, values_in
from hypothesis import given
from hypothesis import strategies as st

from kvstore.wire import Ack, Values
from servers.store.clocks import WorkerClocks
from servers.store.rounds import Rounds


def read(desk: Desk, reply: Any, number: int = 1) -> torch.Tensor:
    assert isinstance(reply, Values), reply
    return values_in(reply, [desk.shard._tables[0].buckets.segment(number).spec])[0]


def updating(workers: int, mode: str = "async", **rule: Any) -> Desk:
    """A shard whose value is 0 and whose optimizer subtracts the gradient."""
    desk = Desk(workers, mode, values={1: floats(0)}, **rule)
    waiting = [desk.ask(worker, worker.set_optimizer("sgd", lr=1.0)) for worker in reversed(desk.workers)]
    assert len(waiting[-1]) == workers
    return desk


# ---- staleness


def test_a_read_waits_for_the_slowest_worker() -> None:
    desk = updating(2, staleness=1)
    fast, slow = desk.workers
    assert desk.reply(fast, fast.push({1: floats(1)}, 1)) == Ack(fast.seq)
    assert read(desk, desk.reply(fast, fast.pull([1], 1))) == -1
    assert desk.reply(fast, fast.push({1: floats(1)}, 2)) == Ack(fast.seq), "a push never waits"
    waiting = fast.pull([1], 2)
    assert desk.reply(fast, waiting) is None
    assert (
        "worker 1, whose push 1 of 'k1' is missing"
        in desk.shard.handle(fast.peer, fast.explain(waiting.seq))[0][1].text
    )
    replies = desk.ask(slow, slow.push({1: floats(1)}, 1))
    assert read(desk, replies[0, waiting.seq]) == -3
    assert replies[0, waiting.seq].ahead == 1
    assert replies[1, slow.seq] == Ack(slow.seq)


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


# ---- quorum


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
    assert desk.reply(c, c.push({1: floats(10)}, 1)) == Ack(c.seq, 1)
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
    assert desk.reply(slow, slow.push({1: floats(5)}, 4)) == Ack(slow.seq)
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
        rounds.contribute(rank, clock, (rank, clock))
        while (items := rounds.complete()) is not None:
            over += 1
            assert rounds.version == over
            assert len([item for item in items if item[1] == over]) >= quorum
            seen += items
    left = [item for _, _, item in rounds.open()]
    assert sorted(seen + left) == sorted(order)


# ---- delay compensation


def test_a_gradient_is_corrected_for_what_others_have_changed() -> None:
    desk = updating(2, compensation=0.5)
    a, b = desk.workers
    assert read(desk, desk.reply(a, a.pull([1]))) == 0
    desk.ask(b, b.push({1: floats(4)}, 1))  # b has read nothing: as it is
    assert desk.value() == -4
    a, b = desk.workers
    reply = desk.reply(b, b.pull([1]))
    assert read(desk, reply) == -4
    desk.ask(a, a.push({1: floats(1)}, 1))  # a has read -4 by ``value``
    assert desk.value() == -5
    desk.ask(b, b.push({1: floats(2)}, 2))  # 2 + 0.5 * 2 * 2 * (-5 - -4) = 0
    assert desk.value() == -5


def test_who_alone_trains_gets_plain_updates() -> None:
    desk = updating(1, compensation=2.0)
    worker = desk.workers[0]
    for clock in (1, 2, 3):
        assert read(desk, desk.reply(worker, worker.push({1: floats(1)}, clock, want=True))) == -clock


def test_what_was_read_goes_along_when_buckets_change() -> None:
    desk = Desk(2, "async", values={1: floats(0), 2: floats(0)}, compensation=1.0)
    for worker in reversed(desk.workers):
        desk.ask(worker, worker.set_optimizer("sgd", lr=1.0))
    a, b = desk.workers
    desk.ask(a, a.push({1: floats(0), 2: floats(0)}, 1, want=True))
    desk.ask(b, b.push({2: floats(1)}, 1))
    desk.ask(a, a.push({2: floats(1)}, 2))  # 1 + 1 * (-1 - 0) = 0
    assert desk.value(2) == -1


# ---- rules that cannot be


@pytest.mark.parametrize(
    ("mode", "rule", "words"),
    [
        ("sync", {"staleness": 1}, "staleness is for 'dist_ssp' stores"),
        ("sync", {"compensation": 0.1}, "delay_compensation for 'dist_async'"),
        ("async", {"quorum": 1}, "a quorum is for stores with rounds"),
        ("sync", {"quorum": 3}, "quorum=3 is more than the 2 workers"),
        ("async", {"compensation": -1.0}, "must be a finite number"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(mode: str, rule: dict[str, Any], words: str) -> None:
    desk = Desk(2)
    worker: Worker = desk.workers[0]
    assert words in text_of(desk.reply(worker, worker.open(mode, store=5, **rule)), "UsageError")


def test_workers_with_different_rules_are_told() -> None:
    desk = Desk(2)
    a, b = desk.workers
    desk.reply(a, a.open("async", store=3, staleness=2))
    text = text_of(desk.reply(b, b.open("async", store=3, staleness=3)), "Mismatch")
    assert text == "store 3 is async, staleness 3 on worker 1, but async, staleness 2 on worker 0"


def test_clocks_have_the_interface_of_rounds() -> None:
    clocks: WorkerClocks[None] = WorkerClocks([0, 1])
    assert clocks.contribute(0, 2, None)
    assert not clocks.contribute(0, 1, None), "an older push has been counted"
    assert (clocks.version, clocks.missing(2)) == (0, {1: 1})
    copied = clocks.copy()
    assert copied.contribute(1, 3, None)
    assert (clocks.version, copied.version) == (0, 2)
    assert clocks.state != copied.state
    assert (clocks.open(), clocks.complete()) == ([], None)
