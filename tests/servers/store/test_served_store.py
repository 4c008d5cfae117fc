"""What pushes and pulls do to a store's segments, and what it refuses, told through the shard that holds them."""

from __future__ import annotations

import itertools

import pytest
import torch
from asking import Desk, Worker, floats, optimized, text_of, values_in

from kvstore import wire
from kvstore.errors import UsageError
from kvstore.rule import Rule
from kvstore.spec import Spec
from servers.store.array_updates import contribute, require_mergeable, updates_of


def test_a_contribution_that_no_round_can_take_is_refused():
    desk = Desk(2, values={1: floats(0), 2: floats(0)})
    optimized(desk, lr=1.0)
    a, b = desk.workers
    desk.ask(a, a.push({1: floats(1)}, 1))
    refused = "push 1 of 'k1' by worker 0 belongs to no open round: 0 rounds are over, and no push may come twice"
    for again in (a.push({1: floats(100)}, 1), a.push({2: floats(100), 1: floats(100)}, 1)):
        assert text_of(desk.ask(a, again)[0, again.seq], "UsageError") == refused
    desk.ask(b, b.push({1: floats(2)}, 1))
    assert desk.value(clock=1).tolist() == [-3]
    late = a.push({1: floats(100)}, 1)
    assert "1 rounds are over" in text_of(desk.ask(a, late)[0, late.seq], "UsageError")
    desk.ask(a, a.push({2: floats(5)}, 1))
    desk.ask(b, b.push({2: floats(2)}, 1))
    assert desk.value(2, clock=1).tolist() == [-7], "the refused push has not left a part of it"


def test_with_a_quorum_a_late_contribution_is_counted_and_one_that_comes_twice_is_refused():
    desk = Desk(3, values={1: floats(0), 2: floats(0)}, quorum=2)
    a, b, c = desk.workers
    desk.ask(a, a.push({1: floats(1)}, 1))
    again = a.push({1: floats(100)}, 1)
    assert "no push may come twice" in text_of(desk.reply(a, again), "UsageError")
    desk.ask(b, b.push({1: floats(1)}, 1))
    assert desk.value(1, clock=1).tolist() == [3]
    late = c.push({1: floats(100), 2: floats(1)}, 1)
    assert desk.reply(c, late) is None, "its other segment waits for its round"
    replies = desk.ask(b, b.push({2: floats(1)}, 1))
    assert replies[2, late.seq] == wire.Ack(late.seq, 1)


def test_an_async_push_that_another_has_overtaken_is_an_update_too():
    desk = Desk(1, "async", values={1: floats(0)})
    optimized(desk, lr=1.0)
    (a,) = desk.workers
    for clock, value in ((2, 10), (1, 1)):
        desk.ask(a, a.push({1: floats(value)}, clock))
    assert desk.value(clock=2).tolist() == [-11]


def test_values_that_were_sent_do_not_change_with_the_next_round():
    for mode, size in itertools.product(("assign", "sgd"), (3, 1 << 15)):
        desk = Desk(1, values={1: torch.zeros(size)})
        if mode == "sgd":
            optimized(desk, lr=1.0)
        (a,) = desk.workers
        held = []
        for clock in range(1, 4):
            push = a.push({1: torch.full((size,), -1.0 if mode == "sgd" else float(clock))}, clock, want=True)
            ((_, reply),) = desk.shard.handle(a.peer, push)
            assert isinstance(reply, wire.Values)
            held.append(reply)
        spec = Spec((size,), "float32")
        assert [set(values_in(reply, [spec])[0].tolist()) for reply in held] == [{1.0}, {2.0}, {3.0}]


def test_a_segment_is_initialized_once():
    desk = Desk(1, values={1: floats(1)})
    (a,) = desk.workers
    reply = desk.reply(a, a.init({2: floats(5), 1: floats(5)}, keys=["new", "k1"]))
    assert text_of(reply, "AlreadyInitialized") == "key 'k1' is already initialized; push a new value instead"
    assert desk.value(1).tolist() == [1]
    assert "no value on this server" in text_of(desk.reply(a, a.pull([2])), "KeyNotInitialized")


@pytest.mark.parametrize("request_of", ["push", "pull", "get_states"])
def test_an_unknown_segment_is_refused(request_of):
    desk = Desk(1, values={1: floats(1)})
    (a,) = desk.workers
    message = a.push({9: floats(1)}) if request_of == "push" else getattr(a, request_of)([1, 9])
    assert "segment 9 has no value" in text_of(desk.reply(a, message), "KeyNotInitialized")


@pytest.mark.parametrize("value", [floats(1), floats(1, 2, 3), torch.zeros(2, dtype=torch.float64)])
def test_a_payload_of_another_size_is_refused_and_is_no_contribution(value):
    desk = Desk(2, values={1: floats(0, 0)})
    a, b = desk.workers
    assert "payload" in text_of(desk.reply(a, a.push({1: value})), "WireError")
    assert desk.ask(b, b.push({1: floats(1, 1)})) == {}
    assert len(desk.ask(a, a.push({1: floats(1, 1)}))) == 2


def test_an_init_whose_payload_does_not_fit_takes_nothing():
    desk = Desk(1)
    (a,) = desk.workers
    message = a.init({1: floats(1), 2: floats(2)})
    message.buffers.append(bytearray(4))
    assert "payload" in text_of(desk.reply(a, message), "WireError")
    again = a.init({1: floats(1), 2: floats(2)})
    assert desk.reply(a, again) == wire.Ack(again.seq)


def test_an_empty_array_is_a_value_like_others():
    desk = Desk(1, values={1: torch.zeros(0, 3), 2: floats(1)})
    (a,) = desk.workers
    push = a.push({1: torch.zeros(0, 3), 2: floats(5)})
    assert desk.reply(a, push) == wire.Ack(push.seq)
    assert desk.value(1, clock=1).shape == (0, 3)


def test_a_round_is_over_when_all_have_pushed_and_both_are_told():
    desk = Desk(2, values={1: floats(0, 0)})
    a, b = desk.workers
    assert desk.ask(a, a.push({1: floats(1, 2)})) == {}
    assert desk.value().tolist() == [0, 0]
    assert desk.ask(b, b.push({1: floats(10, 20)})) == {
        (0, a.seq - 1): wire.Ack(a.seq - 1),
        (1, b.seq): wire.Ack(b.seq),
    }
    assert desk.value().tolist() == [11, 22]


def test_a_pull_waits_for_the_round_it_must_include():
    desk = Desk(2, values={1: floats(0)})
    a, b = desk.workers
    push, pull = a.push({1: floats(1)}), a.pull([1], 1)
    assert desk.ask(a, push) == {}
    assert desk.ask(a, pull) == {}
    replies = desk.ask(b, b.push({1: floats(2)}, want=True))
    assert replies[0, push.seq] == wire.Ack(push.seq)
    for who in ((0, pull.seq), (1, b.seq)):
        assert values_in(replies[who], [Spec((1,), "float32")])[0].tolist() == [3]


def test_a_pull_of_several_waits_for_the_last_of_them():
    desk = Desk(1, values={1: floats(0), 2: floats(0)})
    (a,) = desk.workers
    pull = a.pull([2, 1], [1, 1])
    assert desk.ask(a, pull) == {}
    first = a.push({1: floats(1)})
    assert desk.ask(a, first) == {(0, first.seq): wire.Ack(first.seq)}
    second = a.push({2: floats(2)})
    replies = desk.ask(a, second)
    assert [v.tolist() for v in values_in(replies[0, pull.seq], [Spec((1,), "float32")] * 2)] == [[2], [1]]


def test_rounds_that_come_in_the_wrong_order_are_applied_in_the_right_one():
    desk = Desk(1, values={1: floats(0)})
    optimized(desk, momentum=0.5)
    (a,) = desk.workers
    plain = torch.zeros(1, requires_grad=True)
    expected = torch.optim.SGD([plain], lr=0.5, momentum=0.5)
    for grad in (1.0, -2.0, 4.0):
        plain.grad = floats(grad)
        expected.step()
    messages = [a.push({1: floats(grad)}, clock) for clock, grad in ((1, 1.0), (2, -2.0), (3, 4.0))]
    assert desk.ask(a, messages[2]) == {}
    assert desk.ask(a, messages[1]) == {}
    assert desk.ask(a, messages[0]).keys() == {(0, message.seq) for message in messages}
    assert desk.value(clock=3).tolist() == plain.tolist()


def test_the_order_of_arrival_changes_no_bit():
    grads = [floats(1e8, 1.1), floats(1.0, 2.2), floats(-1e8, 3.3), floats(0.7, 1e-3)]
    results = set()
    for order in itertools.permutations(range(4)):
        desk = Desk(4, values={1: floats(0, 0)})
        for rank in order:
            worker = desk.workers[rank]
            desk.ask(worker, worker.push({1: grads[rank]}))
        results.add(tuple(desk.value(clock=1).tolist()))
    in_order = grads[0] + grads[1] + grads[2] + grads[3]
    assert results == {tuple(in_order.tolist())}
    assert in_order.tolist() != (grads[3] + grads[2] + grads[1] + grads[0]).tolist(), "these grads cannot tell"


def test_async_a_pull_is_answered_at_once():
    desk = Desk(2, "async", values={1: floats(7)})
    assert desk.value(clock=99).tolist() == [7]


def test_each_bucket_gets_its_part_of_the_values_and_its_clock():
    desk = Desk(1, values={1: floats(0), 2: floats(0, 0)})
    buckets = desk.shard.stores[0].buckets
    push = Worker(0).push({1: floats(1), 2: floats(2, 3)}, [1, 2], lr=0.5)
    first, second = updates_of(push, buckets.pushed(push.ids, push.clocks), Rule(), None)
    assert [update.contributions[0].clock for update in (first, second)] == [1, 2]
    assert [update.contributions[0].ranges[0].values.tolist() for update in (first, second)] == [[1], [2, 3]]
    assert first.hyper.lr == 0.5


def test_a_push_of_a_round_that_is_over_is_late_with_a_quorum_and_refused_without():
    desk = Desk(2, values={1: floats(0)}, quorum=1)
    a, b = desk.workers
    desk.ask(a, a.push({1: floats(1)}))
    (bucket,) = desk.shard.stores[0].buckets.all()
    push = b.push({1: floats(2)})
    (update,) = updates_of(push, [bucket], Rule(quorum=1), None)
    assert bucket.rounds.is_late(update.contributions[0].ranks, update.contributions[0].clock)
    desk = Desk(2, values={1: floats(0)})
    for worker in desk.workers:
        desk.ask(worker, worker.push({1: floats(1)}))
    (bucket,) = desk.shard.stores[0].buckets.all()
    with pytest.raises(UsageError, match="belongs to no open round"):
        updates_of(push, [bucket], Rule(), None)


def test_workers_that_are_summed_may_each_have_a_clock():
    desk = Desk(2, "async", values={1: floats(0)}, aggregate="host")
    push = Worker(0, role="aggregator").push({1: floats(2)}, 3, ranks=[0, 1], rank_clocks=[2, 3])
    (bucket,) = desk.shard.stores[0].buckets.all()
    contribute(push, bucket, updates_of(push, [bucket], Rule("async", aggregate="host"), None)[0].contributions[0])
    assert bucket.rounds.clocks == {0: 2, 1: 3}
    require_mergeable(push, Rule("async", aggregate="host"))
    with pytest.raises(UsageError, match="one clock"):
        require_mergeable(push, Rule())
