import numpy as np
import pytest

from kvstore.rows.index import ABSENT, FixedSlots, find_in_fixed


@pytest.mark.parametrize(("stripe", "ids"), [(0, [0, 3, 6, 9]), (1, [1, 4, 7]), (2, [2, 5, 8])])
def test_ids_of_a_stripe_have_slots_in_sequence_once_they_are_made(stripe, ids):
    slots = FixedSlots(10, stripe, 3)
    assert slots.top == len(ids)
    assert (slots.find(np.array(ids)) == ABSENT).all()
    assert slots.insert(np.array(ids[1:])).tolist() == list(range(1, len(ids)))
    assert slots.find(np.array([ids[-1], ids[0]])).tolist() == [len(ids) - 1, ABSENT]
    assert len(slots) == len(ids) - 1
    slots.insert(np.array(ids[:1]))
    assert slots.ids_of(slots.slots()).tolist() == ids


def test_a_stripe_may_have_no_row():
    slots = FixedSlots(2, 3, 4)
    assert (slots.top, len(slots), slots.slots().tolist()) == (0, 0, [])
    with pytest.raises(AssertionError):
        slots.remove(np.array([0]))


def test_ids_of_several_tables_are_found_as_those_of_each():
    tables = [FixedSlots(rows, 1, 3) for rows in (10, 40, 1)]
    ids = [np.array([1, 4, 7]), np.array([1, 34, 37]), np.array([], np.int64)]
    for made in ([], [4, 7], [1]):
        tables[0].insert(np.array(made, np.int64))
        tables[1].insert(np.array(made, np.int64) + 30)
        expected = [slot for each, own in zip(tables, ids, strict=True) for slot in each.find(own).tolist()]
        assert find_in_fixed(tables, np.concatenate(ids), [0, 3, 6, 6]).tolist() == expected
    assert tables[0].full
