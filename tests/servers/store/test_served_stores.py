"""The stores of a server: a standby has the same ones, and refuses what cannot be."""

from __future__ import annotations

import pytest
from asking import floats, sender, text_of
from pairs import Pair, copied, state

from kvstore.wire import Ack, Close, Grouped, OptimizerCalls, ReadBy, Stop, encode


def test_a_store_that_all_have_closed_is_gone_at_the_standby_too():
    pair = Pair(2, values={1: floats(1)})
    for worker in pair.workers:
        pair.ask(worker, Close(worker.me(), 0))
        pair.catch_up()
        assert state(pair.standby) == state(pair.shard)
    assert pair.standby.stores == {}


@pytest.mark.parametrize("captured", [False, True])
def test_a_call_of_set_optimizer_is_answered_by_the_standby(captured: bool):
    pair = Pair(2, values={1: floats(1)})
    a, b = pair.workers
    waiting, same, other = (b.set_optimizer("sgd", lr=lr, version=v) for lr, v in ((0.5, 1), (0.5, 2), (0.25, 2)))
    assert pair.ask(b, waiting) == {}
    pair.ask(a, a.set_optimizer("sgd", lr=0.5, version=1))
    decided = a.set_optimizer("sgd", lr=0.5, version=2)
    pair.ask(a, decided)
    late = b.set_optimizer("sgd", lr=0.5, version=3)
    pair.ask(b, late)
    pair.catch_up()
    if captured:
        pair.standby = copied(pair.shard, 2)
    pair.take_over()
    assert pair.ask(b, waiting) == {(1, waiting.seq): Ack(waiting.seq)}
    assert pair.reply(b, same) == Ack(same.seq)
    assert "differs from worker 0's" in text_of(pair.reply(b, other), "Mismatch")
    assert pair.ask(b, late) == {}
    assert pair.ask(a, a.set_optimizer("sgd", lr=0.5, version=3)).keys() == {(0, a.seq), (1, late.seq)}


def test_what_follows_from_no_state_is_refused():
    pair = Pair(1, values={1: floats(1)})
    pair.catch_up()
    for message, why in [
        (ReadBy(9, [1], [0]), "not open"),
        (Stop(), "no change"),
        (Grouped(0, [1, 2], [2]), "not all here"),
        (Grouped(0, [1], [2]), "cannot be"),
        (Close(sender(), 0), ""),
        (OptimizerCalls(0, [1], [], None, None, [], encode(Close(sender(), 0))), "among the calls"),
    ]:
        if why:
            with pytest.raises(ValueError, match=why):
                pair.standby.apply(message)
