"""Pushes and pulls, their requests and counters: order, many segments, and answers that nobody wants."""

from __future__ import annotations

import random
import tempfile
import threading
import time
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
from kvstore.client import DistStore, optimizing
from kvstore.client.pack import room, sendable
from kvstore.client.push_pull import Counts, PullOfArrays, PullOfRows, PushOfArrays, PushOfRows
from kvstore.client.requests import Requests
from kvstore.member.client import STALL_S
from kvstore.optim import states_file
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


@pytest.mark.parametrize("seed", range(2))
def test_sums_are_right_whatever_overtakes_what(seed: int):
    keys, size, rounds = list(range(12)), 40_000, 8

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


SHAPES = {"a": (5000,), "b": (40, 100), "c": (3,), "d": (9000,)}
PIECE = 2048  # bytes; four of them may be on their way to a server


def work(store: DistStore) -> list[torch.Tensor]:
    keys = list(SHAPES)
    store.init(keys, [torch.zeros(shape) for shape in SHAPES.values()])
    outs = [torch.empty(shape) for shape in SHAPES.values()]
    for step in range(4):
        grads = [
            torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + 10 * store.rank + number))
            for number, shape in enumerate(SHAPES.values())
        ]
        if step % 2:
            store.pushpull(keys, grads, outs)
        else:
            store.push(keys, grads)
            tickets = [
                store.pull(key, out, -i, wait=False) for i, (key, out) in enumerate(zip(keys, outs, strict=True))
            ]
            for ticket in tickets:
                ticket.wait()
    return outs


@pytest.mark.parametrize("servers", [1, 3])
def test_sums_in_segments_have_the_bits_of_whole_arrays(servers: int) -> None:
    results: list[Any] = []
    for piece_bytes, least in ((PIECE, 0), (1 << 20, 0), (1 << 20, 256)):
        with ThreadedJob(2, servers, piece_bytes=piece_bytes, least_piece_bytes=least) as cluster:
            results.append(cluster.run(work))
    for workers in zip(*results, strict=True):
        for arrays in zip(*workers, strict=True):
            assert all(torch.equal(arrays[0], array) for array in arrays)


def test_calls_in_another_order_do_not_lock_up() -> None:
    """Each fills its window with what the other has not pushed yet, and waits for what comes behind it."""

    def crossed(store: DistStore) -> None:
        store.init(["x", "y"], [torch.zeros(20_000), torch.zeros(20_000)])
        first, second = ("x", "y") if store.rank == 0 else ("y", "x")
        store.push(first, torch.ones(20_000))
        out, other = torch.empty(20_000), torch.empty(20_000)
        waiting = store.pull(first, out, wait=False)  # needs the other worker's push, which comes after its own pull
        store.push(second, torch.ones(20_000))
        store.pull(second, other)
        waiting.wait()
        assert (out == 2).all()
        assert (other == 2).all()

    with ThreadedJob(2, 1, piece_bytes=PIECE) as cluster:
        cluster.run(crossed)


def test_a_round_whose_answers_stall_goes_out_whole() -> None:
    """The other worker gets all of a round, whatever this one's window, when nobody answers for a while."""

    def late(store: DistStore) -> None:
        store.init("w", torch.zeros(30_000))
        store.barrier()
        if store.rank == 1:
            time.sleep(3 * STALL_S)  # the round cannot be answered until this one comes
        out = torch.empty(30_000)
        store.pushpull("w", torch.ones(30_000), out)
        assert (out == 2).all()

    with ThreadedJob(2, 2, piece_bytes=PIECE) as cluster:
        cluster.run(late)


def test_who_waits_for_one_pull_does_not_wait_for_the_others() -> None:
    def urgent(store: DistStore) -> None:
        store.init(["x", "y"], [torch.zeros(20_000), torch.zeros(20_000)])
        out, other = torch.empty(20_000), torch.empty(20_000)
        store.push(["x", "y"], [torch.ones(20_000)] * 2)
        slow = store.pull("y", other, -1, wait=False)
        store.pull("x", out, 0)
        assert (out == 2).all()
        assert "waiting" in repr(slow), "what is less urgent has not all been asked for yet"
        slow.wait()
        assert (other == 2).all()

    with ThreadedJob(2, 1, piece_bytes=PIECE) as cluster:
        cluster.run(urgent)


def test_the_states_of_many_segments_are_saved_and_loaded_in_several_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All states of a server in one message would be more frames than it may have."""
    put, get = [], []
    put_states, get_states = Requests.put_states, Requests.get_states
    monkeypatch.setattr(Requests, "put_states", lambda *args: (put.append(len(args[2])), put_states(*args))[1])
    monkeypatch.setattr(Requests, "get_states", lambda *args: (get.append(1), get_states(*args))[1])
    monkeypatch.setattr(optimizing, "AT_ONCE", 4 * PIECE)

    def train(store: DistStore) -> None:
        out = torch.empty(20_000)
        store.set_optimizer("adam", learning_rate=0.1)
        store.init("w", torch.zeros(20_000))
        store.pushpull("w", torch.arange(20_000.0), out)
        store.save_optimizer_states(tmp_path / "first")
        assert len(get) == 10, "five for each server"
        store.pushpull("w", torch.ones(20_000), out)
        store.load_optimizer_states(tmp_path / "first")
        assert len(put) == 10
        assert sum(put) == 3 * 2 * 20, "three states of each segment"
        store.save_optimizer_states(tmp_path / "second")

    with ThreadedJob(1, 2, piece_bytes=PIECE) as cluster:
        cluster.run(train)
    (_, first), (_, second) = (states_file.read(tmp_path / name) for name in ("first", "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[which], second[which]) for which in first)
