"""The clocks of workers where every push is an update, and bounded staleness, which a shard keeps with them."""

from __future__ import annotations

from asking import Desk, floats, read, updating
from hypothesis import given
from hypothesis import strategies as st

from kvstore import wire
from servers.store.rounds import WorkerClocks


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
