import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.rows.admission import EvictionRule
from kvstore.rows.ids import mixed
from kvstore.table import Capacity, Table, Unseen


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
