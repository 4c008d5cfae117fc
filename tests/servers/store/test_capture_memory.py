"""Memory of captures: one block for those under way together, and new memory for what does not fit."""

from __future__ import annotations

import ctypes
import resource
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from asking import Desk, optimized

from kvstore import wire
from servers.store.capture import ALIGN, PAGE, CaptureMemory

SIZE = 2 << 20  # elements: 8 MiB of values, and as much momentum
PR_SET_THP_DISABLE, MADV_DONTNEED = 41, 4


@pytest.fixture
def small_pages() -> Iterator[ctypes.CDLL]:
    """libc, in a process whose new memory comes in pages of 4 KiB."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0):
        pytest.skip("prctl cannot turn huge pages off")
    yield libc
    libc.prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="counts the page faults of one thread")
@pytest.mark.parametrize("cold", [False, True], ids=["prepared", "cold"])
def test_the_first_checkpoint_takes_no_new_memory_in_the_thread_that_serves(
    small_pages: ctypes.CDLL, cold: bool
) -> None:
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
        assert small_pages.madvise(ctypes.c_void_p(start), ctypes.c_size_t(memory.nbytes - PAGE), MADV_DONTNEED) == 0
        memory.release()
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    desk.ask(worker, wire.Capture(worker.me(), 0, 1, [1], [2]))
    desk.ask(worker, pushes[2])
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    pages = 2 * 4 * SIZE // PAGE
    assert faults >= pages - 2 if cold else faults < pages / 50


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
