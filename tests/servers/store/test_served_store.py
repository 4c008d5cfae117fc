"""What pushes and pulls do to a store's segments, and what it refuses, told through the shard that holds them."""

from __future__ import annotations

import itertools

import pytest
import torch
from asking import Desk, floats, optimized, text_of, values_in

from kvstore import wire
from kvstore.spec import Spec


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
