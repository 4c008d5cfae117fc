from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvstore
import workers
from kvstore.errors import UsageError
from kvstore.rows.ids import all_rise, mixed, require_ids, stripes_of
from kvstore.table import Table

FIXED, GROWING = Table(shape=(10, 2)), Table(dim=2)
LARGEST = 2**63 - 1


@pytest.mark.parametrize(
    "given",
    [[[1, 2], [3, 4]], torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), np.array([[1, 2], [3, 4]], np.uint8)],
)
def test_integers_of_any_kind_and_shape_are_taken(given):
    ids = require_ids("ids", given, FIXED)
    assert ids.dtype == np.int64
    assert ids.tolist() == [[1, 2], [3, 4]]


def test_int64_is_not_copied_and_nothing_is_an_empty_list():
    given = np.array([3, 1])
    assert np.shares_memory(require_ids("ids", given, FIXED), given)
    assert (
        require_ids("ids", [], FIXED).tolist() == require_ids("ids", torch.empty(0, dtype=torch.long), FIXED).tolist()
    )


def test_a_growing_table_takes_every_int64():
    ids = [-(2**63), -1, 0, LARGEST]
    assert require_ids("ids", ids, GROWING).tolist() == ids
    assert require_ids("ids", np.array([LARGEST], np.uint64), GROWING).tolist() == [LARGEST]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([0, 3, -1], r"row_ids: id -1 at position 2 cannot be used: .* has the ids 0 to 9"),
        ([[0, 3], [10, -1]], r"id 10 at position \(1, 0\)"),
        (7 + np.arange(5), "id 10 at position 3"),
        ([0.0], "must be integers of at most 64 bits, not numpy's float64"),
        ([], None),
        (torch.tensor([1.0]), "must be integers, not torch's float32"),
        (torch.tensor([True]), "not torch's bool"),
        ([True], "not numpy's bool"),
        (["a"], "must be integers"),
        ([2**64], "must be integers"),
        ([[1], [2, 3]], "row_ids must be an array of integers"),
        (np.zeros(0), "not numpy's float64"),
    ],
)
def test_what_is_no_id_of_the_table_is_refused(given, message):
    if message is None:
        assert require_ids("row_ids", given, FIXED).shape == (0,)
        return
    with pytest.raises(UsageError, match=message):
        require_ids("row_ids", given, FIXED)


class KeyedJaggedTensor:
    """As torchrec's."""

    def keys(self):
        return ["a"]

    def values(self):
        return torch.tensor([1])

    def lengths(self):
        return torch.tensor([1])


NO_IDS = [
    ([1, 2**63], r"at position 1 is 9223372036854775808: ids are int64\. .*id % 2\*\*64"),
    ([2**63], r"at position 0 is 9223372036854775808: .*id % 2\*\*64"),
    ([[1, 2], [2**70, 3]], r"at position 2 is 1180591620717411303424: .*id % 2\*\*64"),
    ([-(2**63) - 1], "at position 0 is -9223372036854775809"),
    ([1, "u7"], "at position 1 is 'u7': number such ids yourself, or pass a hash to a table that grows"),
    (np.array(["u7"]), "must be integers"),
    ([1, None], "at position 1 is None: leave out what is missing"),
    ([[1], [2, 3]], "lists of several lengths: .*offsets"),
    ([torch.tensor([1]), torch.tensor([2, 3])], "lists of several lengths"),
    (np.array([1, None], object), "at position 1 is None"),
    (KeyedJaggedTensor(), r"not a KeyedJaggedTensor: .* ids\[KEY\]\.values\(\) and offsets=ids\[KEY\]\.offsets\(\)"),
    ({1, 2}, "in an array, a tensor or a list, not a set"),
    ({"a": 1}, "not a dict"),
    (iter([1]), "not a list_iterator"),
    (torch.nested.nested_tensor([torch.tensor([1]), torch.tensor([2, 3])], layout=torch.jagged), "nested tensor"),
    (torch.eye(2, dtype=torch.long).to_sparse(), r"pass ids\.to_dense\(\)"),
    (torch.zeros(1, 1, dtype=torch.long, device="meta"), "device meta"),
    (torch.zeros(1, 1, dtype=torch.bfloat16), "must be integers"),
    (np.array(["2020-01-01"], "datetime64[D]"), "must be integers"),
]


@pytest.mark.parametrize(("given", "message"), NO_IDS)
def test_what_are_no_ids_is_refused_with_what_would_work(given, message):
    store = kvstore.create("local")
    bag = workers.EmbeddingBag(None, 2, store=store, key="t")
    calls = [
        lambda: require_ids("ids", given, GROWING),
        lambda: kvstore.RowSparse(given, np.zeros((2, 2))),
        lambda: bag(given),
        lambda: workers.Embedding(10, 2, store=store, key="e")(given),
    ]
    for call in calls:
        with pytest.raises(UsageError, match=message):
            call()


def test_the_advice_for_hashes_gives_ids():
    hashes = [7, 2**63, 2**64 - 1, 2**70 + 3, -1]
    ids = np.array([id % 2**64 for id in hashes], "uint64").view("int64")
    assert require_ids("ids", ids, GROWING).tolist() == [7, -(2**63), -1, 3, -1]


def test_objects_that_are_integers_are_ids():
    assert require_ids("ids", np.array([1, 2**62], object), GROWING).tolist() == [1, 2**62]
    assert require_ids("ids", [torch.tensor(1), np.int8(2), 3], GROWING).tolist() == [1, 2, 3]


def test_a_hash_of_64_bits_without_sign_says_how_to_pass_it():
    with pytest.raises(UsageError, match=rf"id {2**63} at position 1 .*view\('int64'\)"):
        require_ids("ids", np.array([1, 2**63], np.uint64), GROWING)


def test_the_hash_is_splitmix64s():
    # The first numbers of splitmix64 that begins with 0: its state grows by the constant that ``mixed`` adds.
    assert mixed(np.array([0, 0x9E3779B97F4A7C15 - 2**64])).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_stripes_of_a_fixed_table_are_remainders_and_those_of_a_growing_one_are_even():
    assert stripes_of(FIXED, np.arange(7), 3).tolist() == [0, 1, 2, 0, 1, 2, 0]
    counts = np.bincount(stripes_of(GROWING, np.arange(0, 1 << 20, 64), 4), minlength=4)
    assert counts.min() > 0.24 * (1 << 14)


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
