"""The allocator: which parts of chunks are in use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.transport.shm.arena import Blocks, rounded


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40_000), st.randoms(use_true_random=False)), max_size=60))
def test_blocks_never_overlap_and_all_come_back(steps):
    blocks, total, taken = Blocks(), 0, []
    for take, nbytes, random in steps:
        size = rounded(nbytes)
        if take:
            block = blocks.take(size)
            if block is None:
                blocks.grow(total, max(size, 1 << 16))
                total += 1
                block = blocks.take(size)
            assert (block.size, block.offset % 64) == (size, 0)
            assert all(
                other.chunk != block.chunk
                or other.offset + other.size <= block.offset
                or block.offset + block.size <= other.offset
                for other in taken
            )
            taken.append(block)
        elif taken:
            blocks.give(taken.pop(random.randrange(len(taken))))
        for block in taken:
            assert blocks.find(block.chunk, block.offset) is block
            assert blocks.find(block.chunk, block.offset + block.size - 1) is block
    for block in taken:
        blocks.give(block)
    whole = blocks.free
    sizes = {}
    while (block := blocks.take(64 << 10)) is not None:  # chunks grow together again: each has room for one of these
        sizes[block.chunk] = sizes.get(block.chunk, 0) + block.size
    assert sorted(sizes) == list(range(total))
    assert blocks.free == whole - sum(sizes.values())


def test_a_size_that_was_asked_for_before_gets_the_same_memory_and_the_lowest_first():
    blocks = Blocks()
    blocks.grow(0, 1 << 20)
    first, second, other = blocks.take(640), blocks.take(640), blocks.take(128)
    for block in (first, other, second):
        blocks.give(block)
    assert blocks.take(640) is first
    assert blocks.take(640) is second


def test_the_smallest_hole_that_fits_is_taken():
    blocks = Blocks()
    blocks.grow(0, 1 << 16)
    blocks.grow(1, 1 << 14)
    assert blocks.take(1 << 12).chunk == 1
    assert blocks.take(1 << 15).chunk == 0
    assert blocks.find(5, 0) is None
    assert blocks.take(1 << 20) is None
