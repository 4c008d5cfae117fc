"""Slabs of several tables in one array: each has its own items, of zeros, and can outgrow them."""

import mmap

import numpy as np
import pytest

from kvstore.rows.slab_space import SlabSpace
from kvstore.rows.slabs import Slab


def test_slabs_of_one_name_lie_one_after_the_other_at_the_same_place_in_each_array():
    space = SlabSpace(8, 1 << 20)
    places = [space.place(most) for most in (5, 3, 7)]
    rows = [place.slab("", 2, np.float32) for place in places]
    seen = [place.slab("seen", None, np.int64) for place in places]
    for slabs, shape in ((rows, (2,)), (seen, ())):
        assert [slab.first for slab in slabs] == [0, 5, 8]
        assert [slab.items.shape for slab in slabs] == [(5, *shape), (3, *shape), (7, *shape)]
        for number, slab in enumerate(slabs):
            assert slab.whole is slabs[0].whole
            slab.items[:] = number + 1
        assert slabs[0].whole[:15].reshape(15, -1)[:, 0].tolist() == [1] * 5 + [2] * 3 + [3] * 7
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
