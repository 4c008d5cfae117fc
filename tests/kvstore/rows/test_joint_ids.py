"""Ids of several tables are checked together as those of each would be."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.rows.ids import all_rise

LISTS = st.lists(st.lists(st.integers(-1, 12), max_size=4).map(sorted), min_size=1, max_size=5)
ANY = st.lists(st.lists(st.integers(-1, 12), max_size=3), min_size=1, max_size=4)


@given(LISTS | ANY, st.integers(6, 12), st.sampled_from([np.int32, np.int64]))
def test_they_rise_and_are_in_range_together_where_each_does(lists: list[list[int]], rows: int, dtype: type) -> None:
    starts = list(itertools.accumulate(map(len, lists), initial=0))
    ids = np.array(list(itertools.chain(*lists)), dtype)
    tops = [rows - number for number in range(len(lists))]
    expected = all(
        sorted(set(own)) == own and all(0 <= each < top for each in own) for own, top in zip(lists, tops, strict=True)
    )
    least, greatest = np.zeros(len(lists), np.int64), np.array(tops) - 1
    assert all_rise(ids, starts, least, greatest) == expected
    assert all_rise(ids, np.array(starts), least, greatest) == expected


@pytest.mark.parametrize(
    ("lists", "right"),
    [
        ([[1, 2], [1, 2]], True),
        ([[1, 2], [], [0]], True),
        ([[], [3], []], True),
        ([[2, 1], [4]], False),
        ([[1], [4, 4]], False),
        ([[1, 10], [1]], False),
        ([[1], [10]], False),
        ([[1], [-1, 2]], False),
        ([[-1], [2]], False),
    ],
)
def test_one_wrong_id_is_enough(lists: list[list[int]], right: bool) -> None:
    starts = list(itertools.accumulate(map(len, lists), initial=0))
    bounds = np.zeros(len(lists), np.int64)
    assert all_rise(np.array(list(itertools.chain(*lists)), np.int64), starts, bounds, bounds + 9) == right
