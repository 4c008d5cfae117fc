import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import UsageError
from kvstore.rows.admission import AdmissionRule, CountedIds
from kvstore.table import MinCount, Probability, Table


@settings(max_examples=12)
@given(st.lists(st.sets(st.integers(-5, 20), max_size=8).map(sorted), max_size=15))
def test_pushes_are_counted_for_each_id(pushes):
    counted, counts = CountedIds(), {}
    for ids in pushes:
        for number in ids:
            counts[number] = counts.get(number, 0) + 1
        assert counted.add(np.array(ids, np.int64)).tolist() == [counts[number] for number in ids]


def test_an_id_is_forgotten_only_after_many_others():
    counted = CountedIds(most=10)
    counted.add(np.array([-1]))
    for number in range(9):
        counted.add(np.array([number]))
    assert counted.add(np.array([-1])).tolist() == [2]
    counted.add(np.arange(100, 125))
    assert counted.add(np.array([-1])).tolist() == [1]
    assert counted.nbytes < 5000


def test_an_id_with_a_row_is_forgotten_at_once():
    rule = AdmissionRule(Table(dim=1, admit=MinCount(2)))
    ids = np.array([3, 4])
    assert [rule.admit(ids, version).tolist() for version in (1, 2, 3)] == [[False] * 2, [True] * 2, [False] * 2]
    assert AdmissionRule(Table(dim=1)).admit(ids, 1).all()


def test_a_copy_counts_on():
    rule, copy = (AdmissionRule(Table(dim=1, admit=MinCount(3))) for _ in range(2))
    rule.admit(np.array([3, 4]), 1)
    copy.restore(rule.parts())
    for version in (2, 3):
        ids = np.array([4, 5])
        assert rule.admit(ids, version).tolist() == copy.admit(ids, version).tolist()
    with pytest.raises(UsageError, match="remembers"):
        copy.restore({})


def test_a_draw_depends_on_seed_id_and_update_alone():
    ids = np.arange(400)

    def drawn(seed, version):
        return AdmissionRule(Table(dim=1, admit=Probability(0.5), seed=seed)).admit(ids, version)

    assert np.array_equal(drawn(1, 1), drawn(1, 1))
    for other in (drawn(2, 1), drawn(1, 2)):
        assert 130 < np.count_nonzero(other != drawn(1, 1)) < 270
    assert AdmissionRule(Table(dim=1, admit=Probability(1))).admit(ids, 1).all()
