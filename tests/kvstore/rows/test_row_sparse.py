"""``RowSparse``: what it takes, what it refuses, and that it and ``torch.sparse_coo`` are the same to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from foreign import Foreign

import kvstore as kv
from kvstore.rows.row_sparse import integers

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
    for given in (ids[::-1], ids):
        assert kv.RowSparse(given, torch.zeros(3, 2)).ids.tolist() == given.tolist()
