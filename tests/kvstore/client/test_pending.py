"""Requests for arrays: what they say, whom they are for, and what becomes of an answer that nobody wants any more."""

from __future__ import annotations

import pytest
import torch
from played_session import AGGREGATOR
from played_tables import PlayedTables

from kvstore import wire
from kvstore.client.pending import PullOfArrays, PushOfArrays


def test_a_message_is_the_same_when_it_is_made_again() -> None:
    played = PlayedTables(1)
    played.store.init("w", torch.zeros(3))
    played.store.pushpull("w", torch.arange(3.0), out := torch.empty(3))
    request, (message,) = played.session.client.made[-1], played.asked(wire.Push)
    assert isinstance(request, PushOfArrays)
    again = request.message(message.sender)
    assert list(map(bytes, again.buffers)) == list(map(bytes, message.buffers))
    assert (again.ids, again.clocks, again.want) == (message.ids, [1], True)
    assert request.sent == played.store.statistics().bytes_pushed == 3 * 4
    assert out.tolist() == [0, 1, 2]


@pytest.mark.parametrize("aggregator", [False, True])
def test_an_aggregator_stands_in_the_servers_place(aggregator: bool) -> None:
    played = PlayedTables(1, aggregator=aggregator)
    played.store.init("w", torch.zeros(3))
    played.store.push("w", torch.ones(3))
    assert played.session.client.made[-1].peer == (AGGREGATOR if aggregator else b"server 0")


def test_who_has_given_up_gets_no_values() -> None:
    played = PlayedTables(1)
    played.store.init("w", torch.zeros(3))
    played.store.pull("w", out := torch.ones(3))
    assert not out.any()
    request = played.session.client.made[-1]
    assert isinstance(request, PullOfArrays)
    request.forsake()
    request.take(wire.Values(request.seq, buffers=[bytes(range(12))]))
    assert not out.any()
    assert request.operation.raised, "whether it fails does not matter any more"
