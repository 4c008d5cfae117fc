"""Memory for messages: aligned, writable, and frames that lie in several places."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.transport.memory import ALIGN, Heap, ScatteredFrame, keep_freed, space, whole


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 100_001])
def test_allocated_memory_is_aligned_and_writable(nbytes: int) -> None:
    memory = Heap().allocate(nbytes)
    assert (memory.nbytes, memory.readonly, memory.contiguous) == (nbytes, False, True)
    assert np.frombuffer(memory, np.uint8).ctypes.data % ALIGN == 0 or nbytes == 0
    memory[:] = b"x" * nbytes
    assert bytes(memory) == b"x" * nbytes


def test_allocations_do_not_share_memory() -> None:
    heap = Heap()
    first, second = heap.allocate(100), heap.allocate(100)
    first[:], second[:] = b"a" * 100, b"b" * 100
    assert bytes(first) == b"a" * 100


def test_of_plain_memory_nobody_can_tell_who_reads_it() -> None:
    assert Heap().busy(bytearray(3))


def test_space_is_writable() -> None:
    memory = space(1000)
    memory[:] = b"x" * 1000
    assert (len(memory), bytes(memory[-2:])) == (1000, b"xx")


def test_a_frame_in_several_places_becomes_one_and_another_stays_as_it_is() -> None:
    head, tail = bytearray(b"head"), bytearray(b"tail")
    joined = whole(ScatteredFrame([memoryview(head), memoryview(tail)]))
    head[:] = b"____"
    assert bytes(joined) == b"headtail", "it is a copy"
    plain = memoryview(b"plain")
    assert whole(plain) is plain


def test_keeping_freed_memory_may_be_asked_for_again() -> None:
    keep_freed()
    before = keep_freed.cache_info().misses  # more than one where threads of an earlier test asked at the same moment
    keep_freed()
    assert keep_freed.cache_info().misses == before
