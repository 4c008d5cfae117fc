import mmap

import numpy as np
import pytest

from kvstore.rows import slabs
from kvstore.rows.slabs import HUGE, MappedMemory, Slab, gather, scatter


@pytest.mark.parametrize("columns", [None, 1, 3])
def test_items_keep_their_values_and_place_while_it_grows(columns):
    slab = Slab(columns, np.float32)
    slab.reserve(2)
    first = slab.items
    slab.items[:2] = 5
    slab.reserve(100_000)
    assert slab.items is first, "reserved memory is not copied"
    assert (slab.items[:2] == 5).all()
    assert not slab.items[2:100_000].any()
    assert slab.item_bytes == 4 * (columns or 1)


def test_what_outgrows_its_reserve_is_copied(monkeypatch):
    monkeypatch.setattr(slabs, "RESERVED", 64)
    slab = Slab(2, np.float64)
    slab.reserve(1)
    slab.items[0] = 7
    slab.reserve(1000)
    assert slab.items[0].tolist() == [7, 7]
    assert len(slab.items) >= 1000


def test_one_whose_size_is_known_reserves_just_that():
    slab = Slab(3, np.int64, most=10)
    slab.reserve(1)
    assert len(slab.items) == 10
    slab.reserve(11)
    assert len(slab.items) >= 11


def test_where_address_space_is_limited_less_is_reserved(monkeypatch):
    real, asked = mmap.mmap, []

    def limited(fd, length, **options):
        asked.append(length)
        if length > 1 << 20:
            raise OSError("no more")
        return real(fd, length, **options)

    monkeypatch.setattr(mmap, "mmap", limited)
    slab = Slab(None, np.int64)
    slab.reserve(10)
    assert len(slab.items) >= 10
    assert asked[0] == slabs.RESERVED + HUGE
    with pytest.raises(MemoryError, match="8000000 bytes"):
        slab.reserve(1_000_000)


def test_a_process_that_has_much_virtual_memory_reserves_no_more(monkeypatch):
    monkeypatch.setattr(slabs, "MOST", slabs.virtual_bytes() + slabs.RESERVED + slabs.SMALL)
    slab, other = Slab(None, np.int64), Slab(None, np.int64)
    slab.reserve(10)
    assert slab.items.nbytes == slabs.RESERVED
    other.reserve(10)
    other.items[:10] = 3
    assert len(other.items) == 20
    other.reserve(21)
    assert len(other.items) == 42
    assert other.items.tolist() == [3] * 10 + [0] * 32


@pytest.mark.parametrize("columns", [None, 1, 5])
def test_gathered_items_are_scattered_back(columns):
    slab = Slab(columns, np.float32)
    slab.reserve(50)
    slots = np.array([7, 3, 49])
    values = np.arange(3 * (columns or 1), dtype=np.float32).reshape(3, columns or 1)
    values = values[:, 0] if columns is None else values
    scatter(slab.items, slots, values)
    assert np.array_equal(gather(slab.items, slots), values)
    out = np.empty_like(values)
    assert gather(slab.items, slots.astype(np.int32), out) is out
    assert np.array_equal(out, values)
    assert np.count_nonzero(slab.items[:50].reshape(50, -1).any(axis=1)) <= 3


def test_a_growing_slab_has_huge_pages_beyond_the_first(monkeypatch):
    asked = []
    monkeypatch.setattr(MappedMemory, "advise", lambda _, start, stop: asked.append((start, stop)))
    growing = Slab(64, np.float32)
    growing.reserve(1)
    assert asked == [(HUGE, slabs.RESERVED)], "a small table takes little memory"
    Slab(64, np.float32, most=100_000).reserve(1)
    assert len(asked) == 1, "of one whose size is known few items may be used"


def test_pages_that_have_items_are_counted_from_the_start_of_the_memory():
    slab = Slab(64, np.float32, most=100_000)
    assert list(slab.huge_pages(0, 100_000)) == [], "there is no memory yet"
    slab.reserve(1)
    assert slab.huge_pages(0, 100_000) == range(13)
    assert slab.huge_pages(8191, 8193) == range(2)
    part = slab.part(8192 * 3 - 1, 2, False)
    assert part.huge_pages(0, 2) == range(2, 4)
    assert part.huge_pages(1, 99) == range(3, 4)
    small = Slab(64, np.float32, most=4095)
    small.reserve(1)
    assert list(small.huge_pages(0, 4095)) == [], "less than half of one"
