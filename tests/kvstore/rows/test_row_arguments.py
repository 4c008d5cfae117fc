"""What callers give of rows: ids, values and ``RowSparse``."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from foreign import Foreign
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore
import kvstore as kv
import workers
from kvstore.errors import UsageError
from kvstore.rows.ids import all_rise, mixed, require_ids, stripes_of
from kvstore.rows.row_arguments import Wanted, contribution, first_rows, given_rows, is_table, row_sparse
from kvstore.rows.row_sparse import integers
from kvstore.table import Table

# ---- ids


FIXED, GROWING = Table(shape=(10, 2)), Table(dim=2)
LARGEST = 2**63 - 1


@pytest.mark.parametrize(
    "given", [[[1, 2], [3, 4]], torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), np.array([[1, 2], [3, 4]], np.uint8)]
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
    ([1, "u7"], r"at position 1 is 'u7': pass kv.hash_ids\(TEXTS\) to a table that grows, or number the texts"),
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


# ---- what a worker pushes to a table: sums over duplicates and devices, and what is refused before anything is sent


TABLE = kv.Table(shape=(10, 2))
WHAT = "push of key 't' by worker 3"


def test_duplicates_are_summed_and_ids_rise() -> None:
    ids, rows = contribution(WHAT, TABLE, [kv.RowSparse([7, 2, 7], torch.tensor([[1.0, 2], [3, 4], [5, 6]]))])
    assert (ids.tolist(), rows.tolist()) == ([2, 7], [[3, 4], [6, 8]])


def test_devices_are_summed_in_their_order() -> None:
    parts = [torch.full((1, 2), value) for value in (1e8, 1.0, -1e8)]
    ids, rows = contribution(WHAT, TABLE, [kv.RowSparse([4], part) for part in parts])
    assert (ids.tolist(), rows.tolist()) == ([4], [[float(np.float32(1e8) + np.float32(1) - np.float32(1e8))] * 2])


def test_rows_of_any_strides_are_taken() -> None:
    wide = torch.arange(12.0).view(3, 4)
    ids, rows = contribution(WHAT, TABLE, [kv.RowSparse([1, 2, 3], wide[:, ::2])])
    assert rows.tolist() == [[0, 2], [4, 6], [8, 10]]
    assert rows.flags.c_contiguous
    assert ids.tolist() == [1, 2, 3]


def test_rows_that_rise_already_are_not_copied() -> None:
    value = kv.RowSparse([1, 5], torch.ones(2, 2))
    _, rows = contribution(WHAT, TABLE, [value])
    assert rows.ctypes.data == value.rows.data_ptr()


def test_a_gradient_of_another_shape_fits_a_table_that_grows() -> None:
    value = kv.RowSparse([2**40], torch.ones(1, 2), (2**41, 2))
    assert row_sparse(WHAT, value, kv.Table(dim=2)) is value
    with pytest.raises(kv.Mismatch, match=WHAT):
        row_sparse(WHAT, value, TABLE)


def test_the_first_row_that_is_not_finite_is_named() -> None:
    rows = torch.ones(4, 2)
    rows[2, 1] = torch.inf
    value = kv.RowSparse([9, 8, 7, 6], rows)
    contribution(WHAT, TABLE, [value])
    with pytest.raises(kv.NotFinite, match=f"{WHAT}: the row of id 7 at position 2"):
        contribution(WHAT, TABLE, [value], finite=True)


def test_rows_with_nan_are_refused_though_nobody_checks() -> None:
    rows = torch.ones(4, 2)
    rows[0] = torch.tensor([torch.inf, -torch.inf])
    value = kv.RowSparse([9, 8, 7, 6], rows)
    contribution(WHAT, TABLE, [value])
    rows[3, 0] = torch.nan
    with pytest.raises(kv.NotFinite, match=f"{WHAT}: the row of id 6 at position 3 has elements that are NaN"):
        contribution(WHAT, TABLE, [value])


FIRST = "init of key 't' by worker 3"


def test_what_makes_a_table() -> None:
    value = kv.RowSparse([4, 1, 4], torch.ones(3, 2, dtype=torch.float64), (5, 2))
    assert [is_table(each) for each in (kv.Table(dim=2), value, value.to_sparse_coo(), torch.ones(2), 3)] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert first_rows(FIRST, kv.Table(dim=2)) == (kv.Table(dim=2), None)
    for each in (value, value.to_sparse_coo()):
        table, rows = first_rows(FIRST, each)
        assert table == kv.Table(shape=(5, 2), dtype="float64")
        assert rows is not None
        assert (rows[0].tolist(), rows[1].tolist()) == ([1, 4], [[1, 1], [2, 2]])


def test_rows_without_a_table_are_refused() -> None:
    with pytest.raises(kv.UsageError, match=f"{FIRST}: .* no shape"):
        first_rows(FIRST, kv.RowSparse([1], torch.ones(1, 2)))
    with pytest.raises(kv.UsageError, match=f"{FIRST}: dtype int64"):
        first_rows(FIRST, kv.RowSparse([1], torch.ones(1, 2, dtype=torch.int64), (2, 2)))


def test_each_row_is_replaced_once() -> None:
    table = kv.Table(shape=(5, 2))
    ids, rows = given_rows(FIRST, table, kv.RowSparse([3, 0], torch.tensor([[1.0, 2], [3, 4]])))
    assert (ids.tolist(), rows.tolist()) == ([0, 3], [[3, 4], [1, 2]])
    with pytest.raises(kv.UsageError, match=f"{FIRST}: id 3 comes twice"):
        given_rows(FIRST, table, kv.RowSparse([3, 0, 3], torch.ones(3, 2)))


ASKED_TABLE = kv.Table(dim=(1, 2))
ASKED = "row_sparse_pull of key 't' by worker 3"

ids_lists = st.lists(st.lists(st.integers(-5, 5), max_size=6), min_size=1, max_size=4)


def rows_of(ids: np.ndarray) -> np.ndarray:
    return np.stack([ids, -ids], axis=1).astype(np.float32)


@given(ids_lists)
@settings(max_examples=50, deadline=None)
def test_every_output_gets_the_rows_of_its_ids(lists: list[list[int]]) -> None:
    wanted = Wanted(ASKED, ASKED_TABLE)
    outs = [wanted.add(np.array(ids, np.int64), None) for ids in lists]
    sparse = [wanted.add(ids, kv.RowSparse.zeros((0, 1, 2))) for ids in lists]
    assert wanted.ids.tolist() == sorted({each for ids in lists for each in ids})
    wanted.write(rows_of(wanted.ids))
    for ids, out, rows in zip(lists, outs, sparse, strict=True):
        assert out.shape == (len(ids), 1, 2)
        assert out[:, 0, 0].tolist() == ids
        assert rows.ids.tolist() == sorted(set(ids))
        assert rows.rows[:, 0, 1].tolist() == [-each for each in sorted(set(ids))]
    assert not wanted.changed


def test_what_a_push_has_changed_is_not_known_before() -> None:
    wanted = Wanted(ASKED, ASKED_TABLE)
    out = wanted.add(None, kv.RowSparse([3], torch.zeros(1, 1, 2)))
    assert wanted.changed
    assert len(wanted.ids) == 0
    wanted.write_changed(np.array([1, 9]), rows_of(np.array([1, 9])))
    assert (out.ids.tolist(), out.rows[:, 0].tolist()) == ([1, 9], [[1, -1], [9, -9]])
    with pytest.raises(kv.UsageError, match="pass a RowSparse as out, not Tensor"):
        wanted.add(None, torch.zeros(1))


def test_what_became_rows_is_nobodys_memory() -> None:
    wanted = Wanted(ASKED, ASKED_TABLE)
    outs = [wanted.add([1, 2], kv.RowSparse.zeros((0, 1, 2))) for _ in range(2)]
    rows = rows_of(wanted.ids)
    wanted.write(rows)
    rows[:] = 99
    outs[0].rows.fill_(50)
    outs[0].ids.fill_(7)
    assert outs[1].rows[:, 0, 0].tolist() == outs[1].ids.tolist() == [1, 2]


def test_outputs_that_do_not_fit() -> None:
    wanted = Wanted(ASKED, ASKED_TABLE)
    with pytest.raises(kv.Mismatch, match=r"need an out of \[2, 1, 2\], but this is float32\[2, 2\]"):
        wanted.add([1, 2], torch.zeros(2, 2))
    with pytest.raises(kv.Mismatch, match=ASKED):
        wanted.add([1], kv.RowSparse.zeros((0, 2)))


# ---- ``RowSparse``: what it takes, what it refuses, and that it and ``torch.sparse_coo`` are the same to it


ROWS = torch.arange(6.0).view(3, 2)


@pytest.mark.parametrize(
    "ids",
    [
        [4, 0, 4],
        (4, 0, 4),
        np.array([4, 0, 4], np.int16),
        np.array([4, 0, 4], np.uint64),
        np.array([[4], [0], [4]]),
        torch.tensor([4, 0, 4], dtype=torch.int32),
        Foreign(torch.tensor([4, 0, 4])),
    ],
)
def test_ids_are_integers_of_any_kind(ids: Any) -> None:
    value = kv.RowSparse(ids, ROWS, (5, 2))
    assert (value.ids.dtype, value.ids.tolist()) == (torch.int64, [4, 0, 4])
    assert value.to_dense().tolist() == [[2, 3], [0, 0], [0, 0], [0, 0], [4, 6]]
    assert (len(value), value.row, value.shape) == (3, (2,), (5, 2))


@pytest.mark.parametrize("rows", [ROWS.numpy(), Foreign(ROWS), torch.nn.Parameter(ROWS), ROWS])
def test_rows_are_arrays_of_any_kind_and_stay_where_they_are(rows: Any) -> None:
    value = kv.RowSparse([0, 1, 2], rows)
    assert torch.equal(value.rows, ROWS)
    assert value.rows.data_ptr() == ROWS.data_ptr()
    assert value.shape is None


def test_rows_may_have_several_dimensions() -> None:
    value = kv.RowSparse([1], torch.ones(1, 2, 3), (2, 2, 3))
    assert value.to_dense()[1].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert value.row == (2, 3)


@pytest.mark.parametrize("row", [(2,), (2, 3)])
def test_rows_may_have_the_shape_of_a_batch_of_ids(row: tuple[int, ...]) -> None:
    ids, rows = torch.tensor([[1, 3], [3, 0]]), torch.rand(2, 2, *row)
    value, flat = kv.RowSparse(ids, rows, (5, *row)), kv.RowSparse(ids, rows.reshape(4, *row))
    assert value.ids.tolist() == flat.ids.tolist() == [1, 3, 3, 0]
    assert torch.equal(value.rows, flat.rows)
    assert value.row == row
    assert value.rows.data_ptr() == rows.data_ptr()
    with pytest.raises(kv.UsageError, match="4 ids need 4 rows"):
        kv.RowSparse(ids, torch.zeros(2, 2))


def test_no_rows() -> None:
    assert kv.RowSparse([], np.zeros((0, 2), np.float32)).ids.dtype == torch.int64
    empty = kv.RowSparse.zeros((5, 2), "float64")
    assert (len(empty), empty.rows.dtype, empty.shape) == (0, torch.float64, (5, 2))
    assert torch.equal(empty.to_dense(), torch.zeros(5, 2, dtype=torch.float64))
    assert kv.RowSparse.zeros((0, 2)).shape is None


@pytest.mark.parametrize(
    ("ids", "rows", "shape", "text"),
    [
        ([1.0, 2.0], torch.zeros(2, 2), None, "integers, and at position 0 is"),
        ([0, True], torch.zeros(2, 2), None, None),
        (torch.tensor([0.5]), torch.zeros(1, 2), None, "convert arrays of floats"),
        (["a"], torch.zeros(1, 2), None, "must be integers"),
        ([2**70], torch.zeros(1, 2), None, "must be integers"),
        (
            np.array([0, 2**63], np.uint64),
            torch.zeros(2, 2),
            None,
            r"are int64, and at position 1 is 9223372036854775808: pass hashes as ids.view",
        ),
        ([[0], [1, 2]], torch.zeros(3, 2), None, "must be an array of integers"),
        ([0, 1, 2], torch.zeros(2, 2), None, r"3 ids need 3 rows: an array of shape \(3, columns\), not of \(2, 2\)"),
        ([0, 1], torch.zeros(2), None, "2 ids need 2 rows"),
        (
            [0, 5],
            torch.zeros(2, 2),
            (5, 2),
            r"id 5 at position 1 is not in a table of shape \(5, 2\): ids are from 0 to 4",
        ),
        ([0, -1], torch.zeros(2, 2), (5, 2), "id -1 at position 1"),
        ([0], torch.zeros(1, 3), (5, 2), r"shape \(5, 2\) has no rows of shape \(3,\)"),
    ],
)
def test_what_is_refused(ids: Any, rows: Any, shape: Any, text: str | None) -> None:
    if text is None:  # numpy makes integers of such a list
        assert kv.RowSparse(ids, rows, shape).ids.tolist() == [0, 1]
        return
    with pytest.raises(kv.UsageError, match=text):
        kv.RowSparse(ids, rows, shape)


def test_sparse_coo_there_and_back() -> None:
    tensor = torch.sparse_coo_tensor(torch.tensor([[4, 0, 4]]), ROWS, (5, 2), check_invariants=True)
    value = kv.RowSparse.of(tensor)
    assert (value.ids.tolist(), value.shape) == ([4, 0, 4], (5, 2))
    assert torch.equal(value.to_sparse_coo().to_dense(), tensor.to_dense())
    assert kv.RowSparse.of(value) is value
    assert len(kv.RowSparse.of(tensor.coalesce())) == 2


def test_the_gradient_of_an_embedding_is_one() -> None:
    embedding = torch.nn.Embedding(9, 2, sparse=True)
    embedding(torch.tensor([[3, 3], [8, 0]])).sum().backward()
    assert kv.RowSparse.of(embedding.weight.grad).to_dense()[[0, 3, 8]].tolist() == [[1, 1], [2, 2], [1, 1]]


@pytest.mark.parametrize("value", [torch.eye(3).to_sparse(), torch.ones(3, 2), None])
def test_what_is_not_row_sparse(value: Any) -> None:
    with pytest.raises(kv.UsageError, match=r"sparse"):
        kv.RowSparse.of(value)


def test_without_a_shape_there_is_no_whole_table() -> None:
    value = kv.RowSparse([1], torch.ones(1, 2))
    for call in (value.to_dense, value.to_sparse_coo):
        with pytest.raises(kv.UsageError, match=r"no shape.* make it as RowSparse\(ids, rows, shape\)"):
            call()


def test_how_it_is_shown() -> None:
    assert repr(kv.RowSparse([1], torch.ones(1, 2))) == "<RowSparse of 1 rows of float32[*, 2]>"
    assert (
        repr(kv.RowSparse([1], torch.ones(1, 2, 3).double(), (7, 2, 3))) == "<RowSparse of 1 rows of float64[7, 2, 3]>"
    )


def test_integers_keep_their_shape() -> None:
    assert integers("ids", torch.zeros(2, 0, dtype=torch.int32)).shape == (2, 0)
    assert integers("ids", [[1, 2], [3, 4]]).tolist() == [[1, 2], [3, 4]]
    assert integers("ids", 5).shape == ()


def test_ids_may_be_an_array_that_runs_backwards_or_is_read_only() -> None:
    ids = np.arange(3)
    ids.flags.writeable = False
    for backwards in (ids[::-1], ids):
        assert kv.RowSparse(backwards, torch.zeros(3, 2)).ids.tolist() == backwards.tolist()
