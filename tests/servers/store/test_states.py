"""The optimizer's states, out and in."""

from __future__ import annotations

import pytest
import torch
from asking import Desk, floats, optimized, text_of, values_in

from kvstore import wire
from kvstore.spec import Spec


def states_of(desk: Desk, ids: list[int]) -> tuple[wire.OptimizerStates, dict[tuple[int, str], torch.Tensor]]:
    worker = desk.workers[0]
    reply = desk.reply(worker, worker.get_states(ids))
    assert isinstance(reply, wire.OptimizerStates), reply
    specs = [Spec(tuple(shape), dtype) for shape, dtype in zip(reply.shapes, reply.dtypes, strict=True)]
    parts = wire.unpack_arrays(reply.buffers, [spec.nbytes for spec in specs])
    tensors = [
        torch.frombuffer(p, dtype=getattr(torch, s.dtype)).view(s.shape) for p, s in zip(parts, specs, strict=True)
    ]
    return reply, dict(zip(zip(reply.ids, reply.names, strict=True), tensors, strict=True))


def test_states_travel_and_come_back():
    one, two = Desk(1, values={1: floats(0, 0)}), Desk(1, values={1: floats(0, 0)})
    for desk in (one, two):
        optimized(desk, "adam", lr=0.1)
    a = one.workers[0]
    for clock in (1, 2):
        one.ask(a, a.push({1: floats(1, 2)}, clock))
    reply, states = states_of(one, [1])
    assert reply.optimizer == "adam"
    assert {name for _, name in states} == {"step", "exp_avg", "exp_avg_sq"}
    b = two.workers[0]
    two.ask(b, b.push({1: floats(9, 9)}, 1))  # has state of its own by now
    put = b.put_states(states)
    assert two.reply(b, put) == wire.Ack(put.seq)
    before = one.value(clock=2) - two.value(clock=1)
    one.ask(a, a.push({1: floats(3, 3)}, 3))
    two.ask(b, b.push({1: floats(3, 3)}, 2))
    torch.testing.assert_close(one.value(clock=3) - two.value(clock=2), before)


def test_states_that_were_sent_do_not_change():
    desk = Desk(1, values={1: floats(0)})
    optimized(desk, momentum=0.5)
    a = desk.workers[0]
    desk.ask(a, a.push({1: floats(1)}, 1))
    ((_, reply),) = desk.shard.handle(a.peer, a.get_states([1]))
    before = bytes(reply.buffers[0])
    desk.ask(a, a.push({1: floats(1)}, 2))
    assert bytes(reply.buffers[0]) == before
    assert states_of(desk, [1])[1][1, "momentum_buffer"].tolist() == [1.5]


def test_without_an_optimizer_there_are_no_states():
    desk = Desk(1, values={1: floats(0)})
    reply, states = states_of(desk, [1])
    assert (reply.optimizer, states) == (None, {})
    a = desk.workers[0]
    text = text_of(desk.reply(a, a.put_states({(1, "x"): floats(1)})), "UsageError")
    assert "call set_optimizer first" in text


@pytest.mark.parametrize(
    "states",
    [
        {(1, "momentum_buffer"): torch.zeros(3)},  # torch's fused step would read past its end
        {(1, "momentum_buffer"): torch.zeros(1, 50_000)},
        {(1, "momentum_buffer"): torch.zeros(50_000, dtype=torch.float16)},
        {(1, "momentum_buffer"): torch.zeros(50_000), (1, "extra"): torch.zeros(1)},
        {(1, "other"): torch.zeros(50_000)},
        {(1, "momentum_buffer"): torch.zeros(50_000), (2, "momentum_buffer"): torch.zeros(1)},
    ],
)
def test_states_that_do_not_fit_are_refused_and_change_nothing(states):
    desk = Desk(1, values={1: torch.zeros(50_000), 2: floats(0, 0)})
    optimized(desk, momentum=0.5)
    a = desk.workers[0]
    desk.ask(a, a.push({1: torch.ones(50_000), 2: floats(1, 1)}, 1))
    text = text_of(desk.reply(a, a.put_states(states)), "Mismatch")
    assert text.startswith("these are not sgd's states of key 'k")
    assert "momentum_buffer float32[50000] belong there" in text or "momentum_buffer float32[2] belong there" in text
    push = a.push({1: torch.ones(50_000), 2: floats(1, 1)}, 2)
    assert desk.reply(a, push) == wire.Ack(push.seq)
    assert set(states_of(desk, [1])[1][1, "momentum_buffer"].tolist()) == {1.5}


def test_a_value_that_was_sent_survives_loaded_states():
    desk = Desk(1, values={1: floats(4)})
    a = desk.workers[0]
    ((_, reply),) = desk.shard.handle(a.peer, a.pull([1]))
    optimized(desk, momentum=0.5)
    desk.reply(a, a.put_states({(1, "momentum_buffer"): floats(1)}))
    desk.ask(a, a.push({1: floats(1)}, 1))
    assert values_in(reply, [Spec((1,), "float32")])[0].tolist() == [4]
    assert desk.value(clock=1).tolist() == [4 - 0.5 * 1.5]
