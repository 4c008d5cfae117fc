import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import UsageError
from kvstore.rows import admission
from kvstore.rows.admission import AdmissionRule, CountedIds, EvictionRule, GoneIds, write_beginnings
from kvstore.rows.ids import mixed
from kvstore.table import Capacity, MinCount, Probability, Table, Unseen


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


def test_it_says_what_went_after_a_version():
    ids = GoneIds()
    for version in (1, 3, 3, 5):
        ids.add(np.array([version * 10, version * 10 + len(str(ids.nbytes))]), version, 0)
    assert ids.since(5).tolist() == []
    assert ids.since(3).tolist() == [50, 52]
    assert 10 in ids.since(0)


def test_the_oldest_are_forgotten_but_not_in_silence(monkeypatch):
    monkeypatch.setattr(admission, "KEPT", 4)
    ids = GoneIds()
    for version in range(1, 9):
        ids.add(np.array([version]), version, rows=0)
    assert ids.nbytes == 4 * 8
    assert ids.since(4).tolist() == [5, 6, 7, 8]
    with pytest.raises(UsageError, match="remembered since version 4 alone; save the whole table"):
        ids.since(3)
    ids.add(np.array([9]), 9, rows=100)
    assert ids.since(4).tolist() == [5, 6, 7, 8, 9]
    ids.forget(10)
    with pytest.raises(UsageError, match="since version 10"):
        ids.since(9)
    assert ids.since(10).tolist() == []


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=20), st.booleans(), st.data())
def test_those_go_that_come_first_by_count_age_and_hash(rows, by_count, data):
    counts, seen = map(np.array, zip(*rows, strict=True))
    ids = np.arange(len(rows)) - 5
    count = data.draw(st.integers(0, len(rows)))
    rule = EvictionRule(Table(dim=1, evict=Capacity(1, "count" if by_count else "age")), 0, 1)
    chosen = rule.chosen(count, ids, seen, counts if rule.by_count else None)
    order = np.lexsort((mixed(ids), seen, counts) if by_count else (mixed(ids), seen))
    assert sorted(chosen.tolist()) == sorted(order[:count].tolist())


def test_several_rules_are_as_tight_as_the_tightest_and_the_limit_is_parted_over_servers():
    table = Table(dim=1, evict=[Unseen(9), Capacity(100), Unseen(5), Capacity(41, "count")])
    rule = EvictionRule(table, 3, 4)
    assert (rule.rounds, rule.capacity, rule.by_count) == (5, 11, True)
    assert rule.oldest(7) == 2
    assert rule.surplus(11) == 0
    assert rule.surplus(13) == 2
    assert EvictionRule(Table(dim=1, evict=Capacity(160)), 0, 1).surplus(161) == 11
    assert EvictionRule(Table(dim=1), 0, 1).surplus(10**9) == 0


@given(st.integers(1, 100), st.integers(1, 9))
def test_what_all_stripes_may_have_is_what_the_table_may_have(rows, stripes):
    table = Table(dim=1, evict=Capacity(rows))
    parts = [EvictionRule(table, stripe, stripes).capacity for stripe in range(stripes)]
    assert sum(parts) == rows
    assert max(parts) - min(parts) <= 1


MASK = 2**64 - 1


def _mix(x):
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & MASK
    return x ^ (x >> 31)


def _element(table, number, column):
    h = _mix((number + table.seed * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) & MASK)
    h = _mix((h + (column + 1) * 0x9E3779B97F4A7C15) & MASK)
    if table.init == "uniform":
        return ((h >> 11) * 2.0**-52 - 1.0) * table.scale
    t = (sum(h >> shift & 0xFFFF for shift in (0, 16, 32, 48)) - 2 * 65535) / math.sqrt((65536**2 - 1) / 3)
    return (t + (t * t - 3.0) * t / 80.0) * table.scale


def _rows(table, ids):
    rows = np.empty((len(ids), table.width), table.dtype)
    write_beginnings(table, np.array(ids, np.int64), rows)
    return rows


@settings(max_examples=30)
@given(
    st.sampled_from(["uniform", "normal"]),
    st.integers(0, 2**63 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([1, 3]),
    st.floats(0.001, 10),
)
def test_each_element_is_the_function_of_seed_id_and_column_that_the_module_says(init, seed, number, width, scale):
    table = Table(dim=width, dtype="float64", init=init, seed=seed, scale=scale)
    assert _rows(table, [number]).tolist() == [[_element(table, number, column) for column in range(width)]]


def test_values_stay_what_they_are():
    assert _rows(Table(dim=3, init="uniform", seed=1), [5]).tolist() == UNIFORM
    assert _rows(Table(dim=3, init="normal", seed=1), [5]).tolist() == NORMAL


def test_zeros_and_constants():
    assert _rows(Table(dim=2, scale=3.0), [1, 2]).tolist() == [[0, 0], [0, 0]]
    assert _rows(Table(dim=2, init="constant", scale=3.0), [1]).tolist() == [[3, 3]]


@pytest.mark.parametrize("init", ["uniform", "normal"])
def test_a_row_does_not_depend_on_the_others(init):
    table = Table(dim=(7, 3), init=init)
    many = _rows(table, range(5000))
    assert np.array_equal(_rows(table, [4999, 0]), many[[4999, 0]])


def test_they_are_distributed_as_they_are_called():
    uniform = _rows(Table(dim=100, init="uniform", scale=2.0), range(1000))
    assert abs(uniform.mean()) < 0.02
    assert uniform.min() > -2
    assert uniform.max() < 2
    assert abs(uniform.std() - 2 / math.sqrt(3)) < 0.01
    normal = np.sort(_rows(Table(dim=100, init="normal"), range(1000)).ravel())
    for deviations in (-2, -1, 0, 1, 2):
        share = np.searchsorted(normal, deviations) / normal.size
        assert abs(share - 0.5 * (1 + math.erf(deviations / math.sqrt(2)))) < 0.006
    columns = _rows(Table(dim=50, init="normal"), range(2000))
    assert np.abs(np.corrcoef(columns.T) - np.eye(50)).max() < 0.12


UNIFORM = [[-0.23724409937858582, -0.5714535117149353, 0.49996817111968994]]
NORMAL = [[2.0103867053985596, 0.49389541149139404, 0.8772124648094177]]
