"""Requests for rows: what they say, whose they are, and what becomes of an answer that nobody wants any more."""

from __future__ import annotations

import torch
from played_tables import PlayedTables

from kvstore import wire
from kvstore.client.pack_rows import room, sendable
from kvstore.client.pending import PullOfRows, PushOfRows
from kvstore.rows.row_sparse import RowSparse
from kvstore.table import Table
from kvstore.transport.memory import SMALL, Heap


def test_a_message_is_the_same_when_it_is_made_again():
    played = PlayedTables(2)
    played.store.init("t", Table(shape=(10, 4)))
    played.store.pushpull("t", RowSparse([1, 2, 3], torch.arange(12.0).view(3, 4)), row_ids=[2, 5])
    for request, message in zip(played.session.client.made[-2:], played.asked(wire.PushRows), strict=True):
        assert isinstance(request, PushOfRows)
        again = request.message(message.sender)
        assert list(map(bytes, again.buffers)) == list(map(bytes, message.buffers))
        assert again.counts == message.counts
    assert played.store.statistics().bytes_pushed == 3 * 16


def test_who_has_given_up_gets_no_rows():
    played = PlayedTables(1)
    played.store.init("t", Table(shape=(10, 4), init="constant"))
    out = torch.zeros(1, 4)
    played.store.row_sparse_pull("t", out, row_ids=[3])
    request = played.session.client.made[-1]
    assert isinstance(request, PullOfRows)
    assert len(played.asked(wire.PullRows)) == 1
    out.zero_()
    request.forsake()
    request.take(wire.Rows(request.seq, [1], buffers=[bytes(range(16))]))
    assert not out.any()
    assert request.operation.raised, "whether it fails does not matter any more"


def test_large_messages_are_built_in_the_memory_for_them():
    class Counting(Heap):
        taken = 0

        def allocate(self, nbytes: int) -> memoryview:
            self.taken += 1
            return super().allocate(nbytes)

    memory = Counting()
    assert len(room(SMALL - 1, memory)) == SMALL - 1
    assert bytes(sendable(torch.arange(3).numpy(), memory)) == torch.arange(3).numpy().tobytes()
    assert memory.taken == 0
    assert len(room(SMALL, memory)) == SMALL
    many = torch.arange(SMALL).numpy()
    assert bytes(sendable(many, memory)) == many.tobytes()
    assert memory.taken == 2
