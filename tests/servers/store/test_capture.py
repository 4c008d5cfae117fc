"""Captures of segments, and the whole state of a server."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from asking import Desk, Worker, floats, optimized, read, sent
from asking_rows import init_tables, push_rows
from pairs import Pair, copied, rows_of, state

from kvstore import wire
from kvstore.checkpoint.tables import IDS, VALUES, page_name
from kvstore.errors import WireError
from kvstore.table import MinCount, Table
from kvstore.values import from_buffer
from servers.shard import Shard
from servers.store import capture as captures
from servers.store import snapshot
from servers.store.capture import ALIGN, PAGE, SMALL, CaptureMemory, StoreCapture, TableCapture

# ---- captures: segments as they were at their rounds, whatever rounds follow, and whoever copies


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


SIZE = 2 << 20  # elements: 8 MiB of values, and as much momentum
PR_SET_THP_DISABLE, MADV_DONTNEED = 41, 4


def faults_of_the_first_checkpoint(cold: bool) -> int:
    """Return how many pages the thread that serves takes anew for it, of 4 KiB; below 0 where that is not known."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0):
        return -1
    desk = Desk(1, values={1: torch.zeros(SIZE)})
    desk.shard.checkpoints.save = lambda capture: None  # whose thread has not copied anything when the next push comes
    optimized(desk, lr=0.5, momentum=0.5)
    worker = desk.workers[0]
    pushes = [worker.push({1: torch.ones(SIZE)}, clock) for clock in (1, 2, 3)]
    for push in pushes[:2]:
        desk.ask(worker, push)
    memory = desk.shard.checkpoints.memory
    memory.reserve(desk.shard.checkpoints.nbytes)
    if cold:  # as it is without ``reserve``
        memory.hold()
        block = memory.take(memory.nbytes)
        start = -(-block.ctypes.data // PAGE) * PAGE
        assert libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(memory.nbytes - PAGE), MADV_DONTNEED) == 0
        memory.release()
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    desk.ask(worker, wire.Capture(worker.me(), 0, 1, [1], [2]))
    desk.ask(worker, pushes[2])
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


@pytest.mark.skipif(sys.platform != "linux", reason="counts the page faults of one thread")
def test_the_first_checkpoint_takes_no_new_memory_in_the_thread_that_serves() -> None:
    # In a process of its own: what the allocator has at hand, and what a fork has to copy, depends on all tests before.
    program = "from test_capture import *; print(*map(faults_of_the_first_checkpoint, (False, True)))"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    said = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    prepared, cold = map(int, said.stdout.split())
    if prepared < 0:
        pytest.skip("prctl cannot turn huge pages off")
    pages = 2 * 4 * SIZE // PAGE
    assert prepared < pages / 50
    assert cold >= pages - 2, "this cannot tell"


def test_captures_share_the_block_and_the_next_ones_have_it_again() -> None:
    memory = CaptureMemory()
    memory.reserve(3 * ALIGN)
    memory.hold()
    memory.hold()
    first, second = memory.take(ALIGN), memory.take(5)
    assert first.base is second.base is not None
    assert second.ctypes.data == first.ctypes.data + ALIGN
    assert memory.release() == 0
    assert memory.release() == 2 * ALIGN
    memory.hold()
    assert memory.take(7).ctypes.data == first.ctypes.data


def test_what_does_not_fit_is_new_and_counts() -> None:
    memory = CaptureMemory()
    memory.reserve(ALIGN)
    memory.hold()
    assert memory.take(ALIGN + 1).base is None
    assert memory.take(ALIGN).base is not None
    assert memory.release() == 3 * ALIGN
    memory.reserve(3 * ALIGN)
    assert memory.nbytes == 3 * ALIGN


def test_a_block_that_captures_use_stays() -> None:
    memory = CaptureMemory()
    memory.reserve(ALIGN)
    memory.hold()
    taken = memory.take(ALIGN)
    taken[:] = 7
    memory.reserve(2 * ALIGN)
    assert memory.nbytes == ALIGN
    assert np.array_equal(taken, np.full(ALIGN, 7, np.uint8))


def test_pages_are_of_the_round_though_updates_come_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "PAGE_BYTES", 100)
    desk = Desk(1)
    worker = desk.workers[0]
    desk.ask(worker, init_tables(worker, {1: Table(dim=1)}))
    desk.ask(worker, push_rows(worker, {1: {number: [float(number)] for number in range(20)}}, 1))
    target = desk.shard.stores[0].buckets.table(1)
    capture = TableCapture(target)
    headers, parts = [], []
    desk.ask(worker, push_rows(worker, {1: {3: [7.0], 30: [7.0]}}, 2))
    headers = list(capture.headers())
    for clock, part in enumerate(capture.contents(), 3):
        parts.append(bytes(part))
        desk.ask(worker, push_rows(worker, {1: {19: [9.0], 50 + clock: [1.0]}}, clock))
    assert [len(part) for part in parts] == [header.nbytes for header in headers]
    by_name = {header.name: part for header, part in zip(headers, parts, strict=True)}
    pages = range(sum(name.endswith(f"/{IDS}") for name in by_name))
    assert len(pages) > 1
    ids = b"".join(by_name[page_name(1, page, IDS)] for page in pages)
    rows = b"".join(by_name[page_name(1, page, VALUES)] for page in pages)
    assert sorted(np.frombuffer(ids, np.int64)) == list(range(20))
    assert np.array_equal(np.frombuffer(rows, np.float32), np.frombuffer(ids, np.int64))
    before = target.table.statistics()["bytes"]
    capture.drop()
    assert target.table.statistics()["bytes"] < before


# ---- the whole state of a server, told to another


def test_a_copy_has_values_states_and_pauses_and_goes_on_alike():
    pair = Pair(2, values={1: floats(1, 2), 2: floats(3)})
    optimized(pair, "adam", lr=0.5)
    for worker in pair.workers:
        pair.ask(worker, worker.push({1: floats(1, 1), 2: floats(2)}, 1))
    pair.ask(pair.workers[1], pair.workers[1].pause({1: 1, 2: 1}))
    pair.standby = copied(pair.shard, 2)
    pair.records.clear()
    assert state(pair.standby) == state(pair.shard)
    pair.ask(pair.workers[0], pair.workers[0].push({2: floats(1)}, 2))
    pair.require_same()


def test_a_capture_stays_as_it_was_when_it_was_made():
    pair = Pair(1, values={1: floats(1, 2)})
    optimized(pair, "sgd", lr=0.5, momentum=0.5)
    (a,) = pair.workers
    pair.ask(a, a.push({1: floats(1, 1)}, 1))
    before, capture = state(pair.shard), pair.shard.capture()
    pair.ask(a, a.push({1: floats(1, 1)}, 2))
    pair.standby = Shard(0, 1)
    for message in capture:
        pair.standby.apply(message)
    assert state(pair.standby) == before != state(pair.shard)


@pytest.mark.parametrize("kind", [wire.BucketState, wire.StatesState, wire.EncoderState])
def test_what_does_not_fit_is_refused(kind: type):
    pair = Pair(1, values={1: floats(1, 2)})
    (a,) = pair.workers
    if kind is wire.StatesState:
        optimized(pair, "sgd", lr=0.5, momentum=0.5)
    pair.ask(a, a.push({1: floats(1, 1)}, 1))
    if kind is wire.EncoderState:
        pair.ask(a, a.pull([1], 1, back=["2bit", [["threshold", 0.5]]]))
    made = Shard(0, 1)
    for message in pair.shard.capture():
        received = sent(message)
        if isinstance(received, kind):
            received.buffers[0] = received.buffers[0][:-1]
            with pytest.raises(WireError):
                made.apply(received)
            return
        made.apply(received)
    pytest.fail("there was none")


def test_a_push_that_waits_at_one_standby_after_another_counts_once():
    pair = Pair(2, "async", values={1: floats(0)}, staleness=0)
    a, b = pair.workers
    for worker in (a, b):
        pair.ask(worker, worker.set_optimizer("sgd", lr=1.0))
    ahead = a.push({1: floats(1)}, 1, want=True)
    for _ in range(3):
        assert pair.ask(a, ahead) == {}
        pair.shard = copied(pair.shard, 2)
    pair.ask(a, ahead)
    assert read(pair, pair.ask(b, b.push({1: floats(2)}, 1))[0, ahead.seq]) == -3


def pushed(table: Table, rows: int) -> Desk:
    desk = Desk(1)
    worker = desk.workers[0]
    desk.ask(worker, init_tables(worker, {1: table}))
    desk.ask(worker, push_rows(worker, {1: {number: [float(number)] for number in range(rows)}}, 1))
    return desk


def test_pages_are_of_the_moment_though_pushes_come_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = pushed(Table(dim=1, dtype="float32"), 5)
    shard, worker = desk.shard, desk.workers[0]
    wanted = rows_of(shard.stores[0].buckets.table(1).table)
    monkeypatch.setattr(snapshot, "PAGE_BYTES", 1)
    captured: list[wire.Message] = []
    for clock, message in enumerate(shard.capture(), 2):
        captured.append(sent(message))
        desk.ask(worker, push_rows(worker, {1: {0: [9.0], 4: [9.0], 10 * clock: [1.0]}}, clock))
    assert sum(isinstance(message, wire.TablePage) for message in captured) == 5
    standby = Shard(0, 1)
    for message in captured:
        standby.apply(message)
    assert rows_of(standby.stores[0].buckets.table(1).table) == wanted


def test_a_snapshot_that_nobody_reads_is_forgotten() -> None:
    desk = pushed(Table(dim=1, admit=MinCount(1)), 3)
    table = desk.shard.stores[0].buckets.table(1).table
    captured = desk.shard.capture()
    size = table.statistics()["bytes"]
    del captured
    gc.collect()
    assert table.statistics()["bytes"] < size
