import mmap

import numpy as np
import pytest

from kvstore.rows import slabs
from kvstore.rows.slab_space import SlabSpace
from kvstore.rows.slabs import HUGE, PAGE, MappedMemory, Slab, gather, scatter


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


@pytest.fixture
def calls(monkeypatch):
    """What the system is asked for, instead of asking it: advice, start from the mapping's, bytes."""
    asked = []

    class Noted(mmap.mmap):
        def madvise(self, option, start, length):
            asked.append((option, start, length))

    monkeypatch.setattr(mmap, "mmap", Noted)
    monkeypatch.setattr(slabs, "ADVICE", 14)
    monkeypatch.setattr(slabs, "COLLAPSE", 25)
    monkeypatch.setattr(slabs, "huge_pages_allowed", lambda: True)
    return asked


def _pages(calls, advice=14):
    """The numbers of the huge pages that have been asked for in this way since the last time."""
    assert {length for _, _, length in calls} <= {HUGE}
    pages = [start // HUGE for option, start, _ in calls if option == advice]
    calls[:] = [call for call in calls if call[0] != advice]
    return pages


ROWS = HUGE // 256  # of 64 columns, in a huge page


@pytest.mark.parametrize("most", [None, 100_000])
def test_huge_pages_are_asked_for_once_half_of_them_is_used_and_collapsed_one_by_one(calls, most):
    slab = Slab(64, np.float32, most)
    slab.reserve(1)
    for count, pages in ((ROWS // 4, []), (ROWS // 2, [0]), (4 * ROWS - 1, [1, 2, 3]), (4 * ROWS + 5, [])):
        assert slab.fill(count) == bool(pages)
        assert _pages(calls) == pages
        assert slab.items[:count].tobytes() == bytes(256 * count)
    for number in range(4):
        assert slab.collapse() == (number < 3)
        assert _pages(calls, 25) == [number]
    assert not slab.collapse()
    assert calls == []


def test_what_has_moved_keeps_its_values(calls, monkeypatch):
    monkeypatch.setattr(slabs, "RESERVED", 0)
    slab = Slab(64, np.float32)
    for count in (ROWS, 3 * ROWS):
        slab.reserve(count)
        slab.fill(count)
        slab.items[:] = 1.1
    slab.reserve(7 * ROWS)
    slab.fill(3 * ROWS + 1)
    assert (slab.items[: 3 * ROWS] == np.float32(1.1)).all()
    assert 2 in _pages(calls)


def test_of_what_is_loaded_they_are_made_at_once(calls):
    slab = Slab(64, np.float32)
    slab.reserve(1)
    assert not slab.fill(5 * ROWS // 2, loaded=True)
    assert (_pages(calls), _pages(calls, 25)) == ([0, 1, 2], [0, 1, 2])


def test_what_slabs_of_several_tables_have_in_a_page_counts(calls):
    space = SlabSpace(256, 1 << 30)
    tables = [space.place(ROWS // 4).slab("", 64, np.float32) for _ in range(5)]
    for number, pages in zip((4, 3, 0, 2, 1), ([], [], [0], [], []), strict=True):
        tables[number].fill(ROWS // 4)
        assert _pages(calls) == pages


def test_where_mappings_would_become_many_no_more_pages_are_asked_for(calls, monkeypatch):
    monkeypatch.setattr(slabs, "STRETCHES", 2)
    space = SlabSpace(256, 1 << 30)
    tables = [space.place(ROWS).slab("", 64, np.float32) for _ in range(6)]
    for number in (0, 2, 4, 1, 5, 3):
        tables[number].fill(ROWS)
    assert _pages(calls) == [0, 2, 1, 5, 3], "4 would have been a third stretch"


@pytest.mark.parametrize("nbytes", [HUGE // 2, HUGE, HUGE + 1, 5 * HUGE])
def test_it_begins_where_a_huge_page_can_and_has_whole_ones(calls, nbytes):
    memory = MappedMemory(nbytes)
    array = memory.array(np.dtype(np.uint8), nbytes)
    assert array.ctypes.data % HUGE == 0
    last = -(-nbytes // HUGE) - 1
    assert memory.use(last, HUGE)
    assert not memory.use(last + 1, HUGE)
    ((option, start, length),), mapped = calls, len(memory.array(np.dtype(np.uint8), -1))
    assert (option, length) == (14, HUGE)
    assert start % PAGE == 0
    assert start + length <= start % HUGE + mapped, "no byte behind the mapping"
    array[:] = 1
    assert array.all()


@pytest.mark.parametrize("error", ["EINVAL", "EAGAIN", "ENOMEM"])
def test_a_system_that_has_none_does_without(calls, monkeypatch, error):
    class Refusing(mmap.mmap):
        def madvise(self, option, start, length):
            calls.append(option)
            raise OSError(error)

    monkeypatch.setattr(mmap, "mmap", Refusing)
    memory = MappedMemory(2 * HUGE)
    assert memory.use(0, HUGE)
    assert not memory.collapse()
    assert calls == [14, 25]
    assert not memory.array(np.dtype(np.int64), 10).any()


def test_a_system_that_does_not_know_them_or_gives_none_is_not_asked(calls, monkeypatch):
    monkeypatch.setattr(slabs, "ADVICE", None)
    monkeypatch.setattr(slabs, "huge_pages_allowed", lambda: False)
    memory = MappedMemory(2 * HUGE)
    assert memory.use(0, HUGE)
    assert not memory.collapse()
    assert calls == []


def test_slabs_of_one_name_lie_one_after_the_other_at_the_same_place_in_each_array():
    space = SlabSpace(8, 1 << 20)
    places = [space.place(most) for most in (5, 3, 7)]
    rows = [place.slab("", 2, np.float32) for place in places]
    seen = [place.slab("seen", None, np.int64) for place in places]
    for listed, shape in ((rows, (2,)), (seen, ())):
        assert [slab.first for slab in listed] == [0, 5, 8]
        assert [slab.items.shape for slab in listed] == [(5, *shape), (3, *shape), (7, *shape)]
        for number, slab in enumerate(listed):
            assert slab.whole is listed[0].whole
            slab.items[:] = number + 1
        assert listed[0].whole[:15].reshape(15, -1)[:, 0].tolist() == [1] * 5 + [2] * 3 + [3] * 7
    other = places[1].slab("", 2, np.float64)
    assert other.whole is not rows[0].whole
    assert not other.items.any()


def test_a_second_slab_of_a_name_is_a_new_one_of_zeros():
    space = SlabSpace(4, 1 << 20)
    places = [space.place(2), space.place(2)]
    old = [place.slab("momentum", 1, np.float32) for place in places]
    for slab in old:
        slab.items[:] = 9
    new = [place.slab("momentum", 1, np.float32) for place in places]
    assert not any(slab.items.any() for slab in new)
    assert new[0].whole is new[1].whole
    assert all(slab.items.all() for slab in old)


def test_a_table_that_grows_moves_when_its_place_is_full():
    space = SlabSpace(8, 1 << 20)
    place = space.place(None)
    slab = place.slab("", 1, np.float64)
    count = len(slab.items)
    assert count == 1 << 17, "there is no room for a second one"
    slab.items[:] = 3
    before = slab.whole
    slab.reserve(count)
    assert slab.whole is before
    slab.reserve(count + 1)
    assert slab.whole is slab.items is not before
    assert slab.first == 0
    assert (slab.items[:count] == 3).all()
    assert slab.items[count] == 0


@pytest.mark.parametrize("most", [None, 4])
def test_a_table_for_which_there_is_no_room_gets_no_place(most):
    space = SlabSpace(8, 64)
    assert space.place(5) is not None
    assert space.place(most) is None
    assert space.place(3) is not None


@pytest.mark.parametrize("most", [None, 4])
def test_where_virtual_memory_is_limited_slabs_have_their_own(monkeypatch, most):
    class Limited(mmap.mmap):
        def __new__(cls, fileno, length, **options):
            if length > 1 << 16:
                raise OSError("cannot allocate memory")
            return super().__new__(cls, fileno, length, **options)

    monkeypatch.setattr(mmap, "mmap", Limited)
    slab = SlabSpace(8, 1 << 20).place(most).slab("", 2, np.float32)
    assert isinstance(slab, Slab)
    slab.reserve(4)
    assert slab.whole is slab.items
    assert not slab.items[:4].any()
