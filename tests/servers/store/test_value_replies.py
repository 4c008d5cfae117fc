"""Answers that bring values."""

from __future__ import annotations

from asking import Desk, floats

from kvstore import wire


def test_a_push_that_wants_nothing_is_acknowledged_and_a_pull_brings_values():
    desk = Desk(1, values={1: floats(3, 4)})
    (a,) = desk.workers
    replies = desk.shard.stores[0].values
    assert replies.reply(a.push({1: floats(1, 1)}), 2, 0) == wire.Ack(a.seq, 2)
    values = replies.reply(a.pull([1]), 0, 5)
    assert isinstance(values, wire.Values)
    assert (values.ahead, bytes(values.buffers[0])) == (5, floats(3, 4).numpy().tobytes())


def test_an_answer_that_is_being_sent_keeps_its_values():
    desk = Desk(1, values={1: floats(3)})
    (a,) = desk.workers
    before = desk.shard.stores[0].values.reply(a.pull([1]), 0, 0)
    assert isinstance(before, wire.Values)
    desk.reply(a, a.push({1: floats(7)}))
    assert bytes(before.buffers[0]) == floats(3).numpy().tobytes()


def test_an_encoded_answer_of_another_server_leaves_the_same_residual():
    back = ["2bit", [["threshold", 0.5]]]
    here, there = (Desk(1, values={1: floats(0.4, 0.7)}) for _ in range(2))
    (a,) = here.workers
    here.shard.stores[0].values.follow(wire.EncodedAnswer(0, [1], back))
    there.reply(there.workers[0], there.workers[0].pull([1], back=back))
    for desk in (here, there):
        desk.reply(desk.workers[0], desk.workers[0].push({1: floats(0.4, 0.7)}))
    second = [desk.reply(desk.workers[0], desk.workers[0].pull([1], 1, back=back)) for desk in (here, there)]
    assert bytes(second[0].buffers[0]) == bytes(second[1].buffers[0])
    assert a.rank == 0
