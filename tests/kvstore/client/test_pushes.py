"""Priorities: what is urgent leaves first, each key's pushes stay in order, and the sums are what they were."""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from threaded import ThreadedJob
from waiting import LONG

from kvstore import wire
from kvstore.client import DistStore
from kvstore.transport import InprocTransport


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
