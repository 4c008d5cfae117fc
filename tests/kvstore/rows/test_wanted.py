"""Which rows a call wants: each id once, and every output gets its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore as kv
from kvstore.rows.row_arguments import Wanted

TABLE = kv.Table(dim=(1, 2))
WHAT = "row_sparse_pull of key 't' by worker 3"

ids_lists = st.lists(st.lists(st.integers(-5, 5), max_size=6), min_size=1, max_size=4)


def rows_of(ids: np.ndarray) -> np.ndarray:
    """Rows that tell their id."""
    return np.stack([ids, -ids], axis=1).astype(np.float32)


@given(ids_lists)
@settings(max_examples=50, deadline=None)
def test_every_output_gets_the_rows_of_its_ids(lists: list[list[int]]) -> None:
    wanted = Wanted(WHAT, TABLE)
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
    wanted = Wanted(WHAT, TABLE)
    out = wanted.add(None, kv.RowSparse([3], torch.zeros(1, 1, 2)))
    assert wanted.changed
    assert len(wanted.ids) == 0
    wanted.write_changed(np.array([1, 9]), rows_of(np.array([1, 9])))
    assert (out.ids.tolist(), out.rows[:, 0].tolist()) == ([1, 9], [[1, -1], [9, -9]])
    with pytest.raises(kv.UsageError, match="pass a RowSparse as out, not Tensor"):
        wanted.add(None, torch.zeros(1))


def test_what_became_rows_is_nobodys_memory() -> None:
    wanted = Wanted(WHAT, TABLE)
    outs = [wanted.add([1, 2], kv.RowSparse.zeros((0, 1, 2))) for _ in range(2)]
    rows = rows_of(wanted.ids)
    wanted.write(rows)
    rows[:] = 99
    outs[0].rows.fill_(50)
    outs[0].ids.fill_(7)
    assert outs[1].rows[:, 0, 0].tolist() == outs[1].ids.tolist() == [1, 2]


def test_outputs_that_do_not_fit() -> None:
    wanted = Wanted(WHAT, TABLE)
    with pytest.raises(kv.Mismatch, match=r"need an out of \[2, 1, 2\], but this is float32\[2, 2\]"):
        wanted.add([1, 2], torch.zeros(2, 2))
    with pytest.raises(kv.Mismatch, match=WHAT):
        wanted.add([1], kv.RowSparse.zeros((0, 2)))
