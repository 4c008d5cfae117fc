"""Memory of captures: one block for those under way together, and new memory for what does not fit."""

from __future__ import annotations

import numpy as np

from servers.store.capture_memory import ALIGN, CaptureMemory


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
