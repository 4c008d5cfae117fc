"""Captures: segments as they were at their rounds, whatever rounds follow, and whoever copies."""

from __future__ import annotations

import threading

import pytest
import torch
from asking import Desk, Worker, optimized

from kvstore import wire
from kvstore.values import from_buffer
from servers.store.capture import SMALL, StoreCapture

LARGE = SMALL // 4 + 5  # elements of float32: more than is copied at once


def asked(worker: Worker, clocks: dict[int, int], number: int = 1) -> wire.Message:
    return wire.Capture(worker.me(), 0, number, list(clocks), list(clocks.values()))


def captured(capture: StoreCapture) -> dict[str, torch.Tensor]:
    capture.copy()
    headers = capture.headers
    return {
        header.name: from_buffer(bytearray(data), header.dtype).view(list(header.shape))
        for header, data in zip(headers, capture.contents(), strict=True)
    }


def desk(**values: int) -> tuple[Desk, list[StoreCapture]]:
    made = Desk(2, values={number: torch.zeros(size) for number, size in enumerate(values.values(), 1)})
    complete: list[StoreCapture] = []
    made.shard.checkpoints.save = complete.append
    return made, complete


def round_of(made: Desk, clock: int, ids: list[int], sizes: list[int]) -> None:
    for worker in made.workers:
        made.ask(worker, worker.push({n: torch.ones(size) for n, size in zip(ids, sizes, strict=True)}, clock))


@pytest.mark.parametrize("size", [3, LARGE])
def test_later_rounds_change_nothing_of_a_capture(size: int) -> None:
    made, complete = desk(a=size)
    optimized(made, lr=0.5, momentum=0.5)
    round_of(made, 1, [1], [size])
    first = made.workers[0]
    request = asked(first, {1: 1})
    assert made.reply(first, request) == wire.Ack(request.seq)
    (capture,) = complete
    before = made.value(clock=1).clone()
    round_of(made, 2, [1], [size])
    assert not torch.equal(made.value(clock=2), before)
    tensors = captured(capture)
    assert torch.equal(tensors["1/value"], before)
    assert torch.equal(tensors["1/state/momentum_buffer"], torch.full((size,), 2.0))
    assert (capture.clocks, capture.optimizer) == ({1: 1}, "sgd")


def test_each_segment_is_captured_at_its_own_round() -> None:
    made, complete = desk(a=2, b=LARGE)
    optimized(made, lr=0.5)
    first, second = made.workers
    made.ask(first, first.push({1: torch.ones(2)}, 1))
    made.ask(first, first.push({2: torch.ones(LARGE)}, 1))
    made.ask(first, first.push({2: torch.ones(LARGE)}, 2))
    made.ask(first, asked(first, {1: 1, 2: 2}))
    made.ask(second, second.push({2: torch.ones(LARGE)}, 1))
    made.ask(second, second.push({2: torch.ones(LARGE)}, 2))
    made.ask(first, first.push({2: torch.ones(LARGE)}, 3))
    made.ask(second, second.push({2: torch.ones(LARGE)}, 3))
    assert complete == []
    made.ask(second, second.push({1: torch.ones(2)}, 1))
    tensors = captured(complete[0])
    assert tensors["1/value"].tolist() == [-1, -1]
    assert torch.equal(tensors["2/value"], torch.full((LARGE,), -2.0))


def test_segments_that_are_pushed_together_and_alone_are_captured_all_the_same() -> None:
    made, complete = desk(a=2, b=3)
    optimized(made, "adam", lr=0.5)
    round_of(made, 1, [1, 2], [2, 3])
    first = made.workers[0]
    made.ask(first, asked(first, {1: 2, 2: 2}))
    round_of(made, 2, [2], [3])
    round_of(made, 2, [1], [2])
    round_of(made, 3, [1, 2], [2, 3])
    tensors = captured(complete[0])
    assert tensors["1/state/step"] == tensors["2/state/step"] == 2
    assert tensors["2/state/exp_avg"].shape == (3,)


def test_where_rounds_go_on_without_rank_0_a_later_one_is_captured() -> None:
    made = Desk(2, values={1: torch.zeros(1)}, quorum=1)
    complete: list[StoreCapture] = []
    made.shard.checkpoints.save = complete.append
    other = made.workers[1]
    for clock in (1, 2, 3):
        made.ask(other, other.push({1: torch.ones(1)}, clock))
    made.ask(made.workers[0], asked(made.workers[0], {1: 1}))
    assert complete[0].clocks == {1: 3}


def test_in_an_async_store_the_next_push_comes_after_the_capture() -> None:
    made = Desk(1, "async", values={1: torch.zeros(LARGE)})
    complete: list[StoreCapture] = []
    made.shard.checkpoints.save = complete.append
    optimized(made, lr=1.0)
    worker = made.workers[0]
    made.ask(worker, worker.push({1: torch.ones(LARGE)}, 1))
    made.ask(worker, asked(worker, {1: 1}))
    made.ask(worker, worker.push({1: torch.ones(LARGE)}, 2))
    assert torch.equal(captured(complete[0])["1/value"], torch.full((LARGE,), -1.0))


def test_a_thread_and_an_update_copy_beside_each_other() -> None:
    size = (9 << 20) // 4  # several pieces
    made, complete = desk(a=size)
    optimized(made, lr=0.5)
    round_of(made, 1, [1], [size])
    first = made.workers[0]
    made.ask(first, asked(first, {1: 1}))
    thread = threading.Thread(target=complete[0].copy)
    thread.start()
    round_of(made, 2, [1], [size])  # at once: most of it is not copied yet
    thread.join()
    assert torch.equal(captured(complete[0])["1/value"], torch.full((size,), -1.0))
