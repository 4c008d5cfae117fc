import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.rows.sums import RowBatch, coalesce, has_nan, sum_batches, sum_rows


def _rows(count, width, seed=0):
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


def _one_by_one(ids, rows):
    sums = {}
    for number, row in zip(ids.tolist(), rows, strict=True):
        sums[number] = sums[number] + row if number in sums else row.copy()
    return np.array(sorted(sums), np.int64), np.array([sums[number] for number in sorted(sums)])


@settings(max_examples=40)
@given(
    st.lists(st.integers(-3, 12) | st.integers(-(2**63), 2**63 - 1), max_size=60), st.sampled_from([1, 2, 5]), st.data()
)
def test_duplicates_are_summed_in_order_of_position(ids, width, data):
    ids = np.array(ids * data.draw(st.integers(1, 3)), np.int64)
    rows = _rows(len(ids), width)
    got_ids, got = coalesce(ids, rows)
    want_ids, want = _one_by_one(ids, rows)
    assert got_ids.tolist() == want_ids.tolist()
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("width", [1, 3, 64])
def test_an_id_with_very_many_rows_is_summed_in_order_too(width):
    ids = np.random.default_rng(1).integers(0, 3, 1000)
    rows = _rows(1000, width)
    assert coalesce(ids, rows)[1].tobytes() == _one_by_one(ids, rows)[1].tobytes()


def test_ids_that_rise_are_returned_as_they_are():
    ids, rows = np.array([-4, 2, 9]), _rows(3, 2)
    assert coalesce(ids, rows)[0] is ids
    assert coalesce(ids, rows)[1] is rows


@settings(max_examples=40)
@given(st.lists(st.sets(st.integers(-4, 8), max_size=9).map(sorted), min_size=1, max_size=4))
def test_parts_are_summed_in_their_order(parts):
    parts = [(np.array(ids, np.int64), _rows(len(ids), 3, seed)) for seed, ids in enumerate(parts)]
    before = [rows.copy() for _, rows in parts]
    ids, sums = sum_rows(parts)
    want_ids, want = _one_by_one(np.concatenate([i for i, _ in parts]), np.concatenate([r for _, r in parts]))
    assert ids.tolist() == want_ids.tolist()
    assert sums.tobytes() == want.tobytes()
    assert all(np.array_equal(rows, old) for (_, rows), old in zip(parts, before, strict=True))


_SOME_IDS = st.sets(st.integers(-3, 5), max_size=6).map(sorted)


@settings(max_examples=60)
@given(st.integers(1, 3).flatmap(lambda tables: st.lists(st.tuples(*[_SOME_IDS] * tables), min_size=1, max_size=3)))
def test_batches_of_several_tables_are_summed_as_each_table_is(parts):
    batches = []
    for seed, tables in enumerate(parts):
        ids = np.array([number for table in tables for number in table], np.int64)
        starts = np.cumsum([0, *map(len, tables)]).tolist()
        batches.append(RowBatch(ids, _rows(len(ids), 3, seed), starts))
    summed = sum_batches(batches)
    assert len(summed.starts) == len(parts[0]) + 1
    for place in range(len(parts[0])):
        own = [slice(batch.starts[place], batch.starts[place + 1]) for batch in batches]
        ids, rows = sum_rows([(batch.ids[part], batch.rows[part]) for batch, part in zip(batches, own, strict=True)])
        part = slice(summed.starts[place], summed.starts[place + 1])
        assert summed.ids[part].tolist() == ids.tolist()
        assert summed.rows[part].tobytes() == rows.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "least", [[], [1], [np.inf], [np.inf, -np.inf], [-np.inf], [3e38, 3e38], [1e-45]], ids=lambda least: str(least)
)
def test_nan_is_found_whatever_else_there_is(dtype, least):
    rows = np.zeros((20, 7), dtype)
    rows.flat[: len(least)] = least
    assert not has_nan(rows)
    assert not has_nan(rows[:0])
    for place in (0, 70, 139):
        rows.flat[place] = np.nan
        assert has_nan(rows)
        rows.flat[place] = 0


def test_sums_overflow_and_underflow_in_silence_where_a_program_lets_numpy_raise():
    tiny, huge = np.float32(1e-30), np.float32(3e38)
    rows = np.array([[tiny, huge], [tiny, huge], [np.inf, tiny], [-np.inf, tiny]], np.float32)
    with np.errstate(all="raise"):
        ids, summed = coalesce(np.array([4, 4, 2, 2]), rows)
        twice = sum_rows([(ids, summed), (ids, summed)])[1]
        apart = sum_rows([(ids, summed), (ids[:1], summed[:1]), (ids[1:], summed[1:])])[1]
        merged = sum_rows([(ids, summed), (ids[1:], summed[1:])])[1]
        assert not has_nan(rows)
    assert ids.tolist() == [2, 4]
    assert np.isnan(summed[0, 0])
    assert summed[1].tolist() == [2 * tiny, np.inf]
    assert twice[1].tolist() == apart[1].tolist() == merged[1].tolist() == [4 * tiny, np.inf]
