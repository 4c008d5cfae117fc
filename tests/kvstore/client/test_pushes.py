"""Pushes and pulls, their requests and counters: what they say, and what becomes of an answer that nobody wants."""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from inproc import InprocTransport
from played_session import AGGREGATOR
from played_tables import PlayedTables
from threaded import ThreadedJob
from waiting import LONG

from kvstore import wire
from kvstore.client import DistStore
from kvstore.client.pack import room, sendable
from kvstore.client.pushes import Counts, PullOfArrays, PullOfRows, PushOfArrays, PushOfRows
from kvstore.rows.row_sparse import RowSparse
from kvstore.table import Table
from kvstore.transport.memory import SMALL, Heap


@pytest.fixture
def pushes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int | None]]:
    """The priorities of worker 0's pushes and of what answers them, each with how many segments it is of."""
    made: list[tuple[int, int | None]] = []
    send = InprocTransport.send

    def watched(self: InprocTransport, peer: bytes, frames: Sequence[Any], priority: int | None = None) -> None:
        message = wire.decode(frames)
        if isinstance(message, wire.Push) and message.node.rank == 0:
            made.append((len(message.ids), message.priority))
            assert priority in (message.priority, None), "one that waits for its turn has left in it"
        send(self, peer, frames, priority)

    monkeypatch.setattr(InprocTransport, "send", watched)
    return made


def test_a_push_may_overtake_but_none_of_its_own_keys(pushes: list[tuple[int, int | None]]):
    def work(store: DistStore) -> float:
        out = torch.zeros(3)
        store.init(["a", "b", "c"], [torch.zeros(3)] * 3)
        if store.rank == 1:
            assert first_has_pushed.wait(LONG)
        store.push("a", torch.ones(3), priority=-3)
        store.pushpull("b", torch.ones(3), torch.zeros(3), priority=-2, wait=False)
        store.push("a", torch.ones(3), priority=-1)  # the one before has not taken effect, and must be first
        store.pushpull(["b", "c"], [torch.ones(3)] * 2, [torch.zeros(3)] * 2, priority=4, wait=False)
        store.push("c", torch.ones(3))
        first_has_pushed.set()
        store.pull(["a", "b", "c"], [torch.zeros(3), torch.zeros(3), out])
        store.pushpull("a", torch.ones(3), out, priority=7, wait=False).wait()
        store.pushpull("b", torch.ones(3), torch.zeros(3), priority=5, wait=False)
        store.pushpull("b", torch.ones(3), torch.zeros(3), priority=6)  # nor may its answer come first
        store.pushpull("b", torch.ones(3), torch.zeros(3), priority=8)
        store.push("b", torch.ones(3), priority=10**20)
        return float(out[0])

    first_has_pushed = threading.Event()
    with ThreadedJob(2, 1) as cluster:
        assert cluster.run(work) == [2.0, 2.0]
    assert pushes == [
        (1, -3),
        (1, -2),
        (1, None),
        (2, None),
        (1, None),
        (1, 7),
        (1, 5),
        (1, None),
        (1, 8),
        (1, wire.MAX_PRIORITY),
    ]


@pytest.mark.parametrize("seed", range(3))
def test_sums_are_right_whatever_overtakes_what(seed: int):
    keys, size, rounds = list(range(12)), 40_000, 12

    def work(store: DistStore) -> list[float]:
        draws = random.Random(100 * seed + store.rank)
        store.init(keys, [torch.zeros(size) for _ in keys])
        outs = [torch.zeros(size) for _ in keys]
        for step in range(1, rounds + 1):
            order = keys[:]
            draws.shuffle(order)
            for key in order:
                value = torch.full((size,), float(step * (store.rank + 1)))
                store.pushpull(key, value, outs[key], priority=draws.randrange(-3, 3), wait=False)
        store.barrier()
        store.pull(keys, outs)
        return [float(value) for out in outs for value in (out.min(), out.max())]

    with (
        tempfile.TemporaryDirectory() as directory,
        ThreadedJob(2, 2, directory=Path(directory), piece_bytes=32 << 10) as cluster,
    ):
        for found in cluster.run(work):
            assert set(found) == {3.0 * rounds}


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


def test_a_message_of_rows_is_the_same_when_it_is_made_again():
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


def test_calls_count_their_keys() -> None:
    counts = Counts().called(3, 0).called(2, 2).called(0, 5)
    assert (counts.pushes, counts.pulls) == (5, 7)


def test_late_segments_count_only_where_rounds_may_be_over_before() -> None:
    answer = wire.Ack(1, missed=4)
    assert Counts().sent(100, answer, quorum=True) == Counts(bytes_pushed=100, late=4)
    assert Counts().sent(100, answer, quorum=False) == Counts(bytes_pushed=100)
    assert Counts(late=1).sent(0, wire.Values(1, missed=2), quorum=True).late == 3


def test_reads_count_their_bytes_and_how_far_ahead_they_were() -> None:
    counts = Counts().received(10, 0).received(20, 2).received(30, 0)
    assert counts.bytes_pulled == 60
    assert dict(counts.staleness) == {0: 2, 2: 1}
    assert Counts().received(5, None) == Counts(bytes_pulled=5), "rounds have no staleness"


def test_a_change_leaves_what_there_was() -> None:
    before = Counts().received(10, 1)
    after = before.received(10, 1).called(1, 1)
    assert dict(before.staleness) == {1: 1}
    assert dict(after.staleness) == {1: 2}
    assert before.pulls == 0
