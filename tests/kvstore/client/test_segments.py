"""Many segments: they take turns, servers answer one by one, and no order of calls locks up."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from threaded import ThreadedJob

from kvstore.client import DistStore, optimizing
from kvstore.client.requests import Requests
from kvstore.member.client import STALL_S
from kvstore.optim import states_file

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


def test_an_array_of_thousands_of_segments():
    """More than there may be servers: the scheduler's answer once was refused for that."""

    def large(store: DistStore) -> None:
        store.init("w", torch.arange(1_100_000.0))
        out = torch.empty(1_100_000)
        store.pushpull("w", torch.ones(1_100_000), out)
        assert (out == 2).all()

    with ThreadedJob(2, 1, piece_bytes=1024) as cluster:
        cluster.run(large)


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
