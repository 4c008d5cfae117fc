"""The stores of a server: a standby has the same ones, and refuses what cannot be."""

from __future__ import annotations

import pytest
from asking import floats, sender
from pairs import Pair, state

from kvstore import wire


def test_a_store_that_all_have_closed_is_gone_at_the_standby_too():
    pair = Pair(2, values={1: floats(1)})
    for worker in pair.workers:
        pair.ask(worker, wire.Close(worker.me(), 0))
        pair.catch_up()
        assert state(pair.standby) == state(pair.shard)
    assert pair.standby.stores == {}


def test_what_follows_from_no_state_is_refused():
    pair = Pair(1, values={1: floats(1)})
    pair.catch_up()
    for message, why in [
        (wire.ReadBy(9, [1], [0]), "not open"),
        (wire.Stop(), "no change"),
        (wire.Grouped(0, [1, 2], [2]), "not all here"),
        (wire.Grouped(0, [1], [2]), "cannot be"),
        (wire.Close(sender(), 0), ""),
        (wire.OptimizerCalls(0, [1], [], None, None, [], wire.encode(wire.Close(sender(), 0))), "among the calls"),
    ]:
        if why:
            with pytest.raises(ValueError, match=why):
                pair.standby.apply(message)
