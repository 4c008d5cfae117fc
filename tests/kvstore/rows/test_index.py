import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import UsageError
from kvstore.rows import index
from kvstore.rows.index import ABSENT, FixedSlots, SlotIndex, find_in_all, find_in_fixed, insert_in_all, insert_in_fixed
from kvstore.rows.slab_space import SlabSpace

EXTREMES = [0, -1, 1, -(2**63), 2**63 - 1, -2]
IDS = st.integers(-8, 40) | st.sampled_from(EXTREMES)


def _check(slots, known):
    everything = np.array(sorted(known), np.int64)
    found = slots.find(everything)
    assert len(set(found.tolist())) == len(known)
    assert all(found >= 0)
    assert slots.ids_of(found).tolist() == everything.tolist()
    assert sorted(found.tolist()) == slots.slots().tolist()
    assert len(slots) == len(known)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.booleans(), st.sets(IDS, max_size=30)), max_size=25))
def test_it_has_what_a_set_has(steps):
    slots, known = SlotIndex(), set()
    for insert, ids in steps:
        if insert:
            new = sorted(ids - known)
            slots.insert(np.array(new, np.int64))
            known |= ids
        else:
            old = np.array(sorted(ids & known), np.int64)
            slots.remove(slots.find(old))
            known -= ids
        _check(slots, known)
        absent = np.array(sorted(ids - known), np.int64)
        assert (slots.find(absent) == ABSENT).all()


def test_very_many_ids_in_any_pattern_and_more_than_once_in_a_search():
    ids = np.concatenate([np.arange(20_000) << 40, -1 - np.arange(20_000), np.array([2**63 - 1])])
    slots = SlotIndex()
    placed = slots.insert(ids)
    searched = np.random.default_rng(0).choice(len(ids), 100_000)
    assert np.array_equal(slots.find(ids[searched]), placed[searched])
    assert (slots.find(ids[searched] ^ (1 << 30)) == ABSENT).all()


def test_slots_of_removed_ids_are_used_again_and_entries_do_not_pile_up():
    slots = SlotIndex()
    for start in range(0, 100_000, 1000):
        placed = slots.insert(np.arange(start, start + 1000))
        slots.remove(placed)
    assert slots.top == 1000
    assert slots.nbytes < 100_000


def test_more_rows_than_slots_can_be_numbered_are_refused(monkeypatch):
    monkeypatch.setattr(index, "MOST_SLOTS", 3)
    slots = SlotIndex()
    slots.insert(np.array([5, 6]))
    with pytest.raises(UsageError, match="at most 3 rows"):
        slots.insert(np.array([7, 8]))
    _check(slots, {5, 6})


def _indexes(count, joint):
    """Indexes whose entries and ids lie in the same arrays, or in memory of their own."""
    if not joint:
        return [SlotIndex() for _ in range(count)]
    space = SlabSpace(8, 1 << 30)
    places = [space.place(1000) for _ in range(count)]
    return [SlotIndex(place.slab("entries", None, np.int32), place.slab("ids", None, np.int64)) for place in places]


@given(
    st.lists(
        st.tuples(st.sets(st.integers(-40, 40)), st.sets(st.integers(-40, 40)), st.lists(st.integers(-45, 45))),
        min_size=1,
    ),
    st.booleans(),
)
@settings(max_examples=60)
def test_ids_of_several_tables_are_found_as_those_of_each(tables, joint):
    """Also where others have been removed, and in tables that are empty."""
    indexes, ids = _indexes(len(tables), joint), []
    for each, (there, removed, wanted) in zip(indexes, tables, strict=True):
        each.insert(np.array(sorted(there), np.int64) * 2**40)
        each.remove(each.find(np.array(sorted(there & removed), np.int64) * 2**40))
        ids.append(np.array(wanted, np.int64) * 2**40)
    expected = [slot for each, own in zip(indexes, ids, strict=True) for slot in each.find(own).tolist()]
    starts = list(itertools.accumulate(map(len, ids), initial=0))
    assert find_in_all(indexes, np.concatenate(ids), starts).tolist() == expected


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.lists(IDS, unique=True, max_size=40), min_size=3, max_size=3), max_size=4),
    st.booleans(),
    st.booleans(),
)
def test_ids_of_several_tables_get_the_slots_that_they_get_one_by_one(rounds, removed, joint):
    together, apart = _indexes(3, joint), _indexes(3, joint=False)
    for wanted in rounds:
        new = [
            np.array([each for each in ids if index.find(np.array([each])) == ABSENT], np.int64)
            for index, ids in zip(apart, wanted, strict=True)
        ]
        starts = list(itertools.accumulate(map(len, new), initial=0))
        slots = insert_in_all(together, np.concatenate(new), starts)
        assert slots.tolist() == [slot for each, ids in zip(apart, new, strict=True) for slot in each.insert(ids)]
        for one, other in zip(together, apart, strict=True):
            known = np.array([*range(-8, 41), *EXTREMES])
            assert one.find(known).tolist() == other.find(known).tolist()
            if removed and len(one):
                one.remove(one.slots()[:3].astype(np.int32))
                other.remove(other.slots()[:3].astype(np.int32))


@pytest.mark.parametrize("few", [0, index.FEW])
@pytest.mark.parametrize("joint", [False, True])
def test_long_searches_in_several_tables(monkeypatch, joint, few):
    """All ids begin at one entry, so that most are further than one window away."""
    monkeypatch.setattr(index, "mixed", lambda ids: np.zeros(len(ids), np.uint64))
    monkeypatch.setattr(index, "FEW", few)
    indexes, ids = _indexes(3, joint), [np.arange(30), np.arange(5), np.arange(25, 70)]
    for each in indexes:
        each.insert(np.arange(50))
    found = find_in_all(indexes, np.concatenate(ids), [0, 30, 35, 80])
    assert found.tolist() == [*range(30), *range(5), *range(25, 50), *[ABSENT] * 20]


@pytest.mark.parametrize(("stripe", "ids"), [(0, [0, 3, 6, 9]), (1, [1, 4, 7]), (2, [2, 5, 8])])
def test_ids_of_a_stripe_have_slots_in_sequence_once_they_are_made(stripe, ids):
    slots = FixedSlots(10, stripe, 3)
    assert (slots.top, slots.most) == (0, len(ids))
    assert (slots.find(np.array(ids)) == ABSENT).all()
    assert slots.insert(np.array(ids[1:])).tolist() == list(range(len(ids) - 1))
    assert slots.find(np.array([ids[-1], ids[0]])).tolist() == [len(ids) - 2, ABSENT]
    assert (len(slots), slots.missing().tolist()) == (len(ids) - 1, ids[:1])
    slots.insert(np.array(ids[:1]))
    assert slots.ids_of(slots.slots()).tolist() == ids[1:] + ids[:1], "in the order in which they came"
    assert not len(slots.missing())


def test_a_stripe_may_have_no_row():
    slots = FixedSlots(2, 3, 4)
    assert (slots.top, len(slots), slots.slots().tolist()) == (0, 0, [])
    with pytest.raises(AssertionError):
        slots.remove(np.array([0]))


@pytest.mark.parametrize("together", [False, True])
def test_ids_of_several_tables_with_fixed_slots_are_found_as_those_of_each(together):
    sizes = (10, 40, 1)
    tables, apart = [FixedSlots(rows, 1, 3) for rows in sizes], [FixedSlots(rows, 1, 3) for rows in sizes]
    if together:
        space = SlabSpace(4, 1 << 20)
        slabs = [[space.place(20).slab(name, None, np.int32) for name in ("entries", "places")] for _ in sizes]
        tables = [FixedSlots(rows, 1, 3, *own) for rows, own in zip(sizes, slabs, strict=True)]
    ids = [np.array([1, 4, 7]), np.array([1, 34, 37]), np.array([], np.int64)]
    for made in ([], [4, 7], [1]):
        new = [np.array(made, np.int64), np.array(made, np.int64) + 30]
        slots = insert_in_fixed(tables, np.concatenate(new), [0, len(made), 2 * len(made), 2 * len(made)])
        assert slots.tolist() == [slot for each, own in zip(apart, new, strict=False) for slot in each.insert(own)]
        expected = [slot for each, own in zip(apart, ids, strict=True) for slot in each.find(own).tolist()]
        assert find_in_fixed(tables, np.concatenate(ids), [0, 3, 6, 6]).tolist() == expected
    for each, other in zip(tables, apart, strict=True):
        assert each.ids_of(each.slots()).tolist() == other.ids_of(other.slots()).tolist()


def test_rows_that_come_in_the_order_of_ids_are_found_without_a_look_until_one_does_not():
    """Of one table and of several: of a part of one, of the next one, of a full one, and after one has come apart."""
    tables, ids = [FixedSlots(rows, 0, 1) for rows in (6, 4)], np.arange(6)
    both, starts = np.concatenate([ids, ids[:4]]), [0, 6, 10]
    for number, new in ((0, [0, 1]), (0, [2]), (1, [0, 1, 2, 3]), (0, [5, 3])):
        ordered = new != [5, 3]
        tables[number].insert(np.array(new))
        assert tables[number].ordered == ordered
        first = [0, 1, 2, 4, ABSENT, 3] if not ordered else [*range(tables[0].top), *[ABSENT] * 6][:6]
        expected = [first, [0, 1, 2, 3] if tables[1].full else [ABSENT] * 4]
        assert [each.find(ids[: each.most]).tolist() for each in tables] == expected
        assert find_in_fixed(tables, both, starts).tolist() == expected[0] + expected[1]
        assert tables[0].ids_of(tables[0].slots()).tolist() == [0, 1, 2, 5, 3][: tables[0].top]


def test_more_rows_of_a_table_with_a_shape_than_entries_can_number_are_refused(monkeypatch):
    monkeypatch.setattr(index, "MOST_SLOTS", 3)
    slots = FixedSlots(9, 0, 1)
    slots.insert(np.array([1, 2]))
    with pytest.raises(UsageError, match="at most 3 rows"):
        slots.insert(np.array([3, 4]))
    assert (len(slots), slots.find(np.array([3, 4])).tolist()) == (2, [ABSENT] * 2)
