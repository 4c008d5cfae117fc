"""When rounds close, and who is answered then, told through the shard that holds the store."""

from __future__ import annotations

import itertools

import torch
from asking import Desk, floats, optimized, values_in

from kvstore import wire
from kvstore.spec import Spec


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
