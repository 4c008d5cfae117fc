"""What a table is: what there can be, how it is described to others, and what it has where."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

import kvstore as kv
from kvstore.table import TableSpec

FULL = kv.Table(
    dim=(2, 3),
    dtype="float64",
    init="normal",
    scale=0.5,
    seed=7,
    admit=kv.Probability(0.25),
    evict=[kv.Unseen(10), kv.Capacity(1000, by="count")],
    codec="int8",
)


@pytest.mark.parametrize(
    "table",
    [
        FULL,
        kv.Table(shape=(10, 3)),
        kv.Table(shape=(10, 3, 2), init="uniform", scale=2),
        kv.Table(dim=4, admit=kv.MinCount(3), evict=kv.Unseen(5)),
        kv.Table(shape=(10, 3), parameter="embedding.weight"),
        kv.Table(shape=(10, 3), parameter=0),
    ],
    ids=str,
)
def test_what_is_described_comes_back(table: kv.Table) -> None:
    assert kv.Table.of(table.described) == table


def test_numbers_of_any_library_are_taken() -> None:
    table = kv.Table(
        dim=np.int64(2),
        scale=np.float32(0.5),
        seed=np.int64(3),
        admit=kv.MinCount(np.int64(3)),
        evict=[kv.Unseen(np.int32(5)), kv.Capacity(torch.tensor(7))],
    )
    plain = kv.Table(dim=2, scale=0.5, seed=3, admit=kv.MinCount(3), evict=[kv.Unseen(5), kv.Capacity(7)])
    assert (table, repr(table)) == (plain, repr(plain))
    assert json.dumps(table.described) == json.dumps(plain.described)
    assert kv.Probability(np.float32(0.5)) == kv.Probability(0.5)


def test_a_table_has_the_name_of_the_parameter_whose_rows_it_has() -> None:
    fixed = kv.Table(shape=(10, 3))
    of_parameter = kv.Table(shape=(10, 3), parameter="w")
    assert (fixed.name("t"), of_parameter.name("t")) == ("t", "w")
    assert of_parameter.alone == fixed
    assert len(fixed.described) == 9  # as older versions have it


def test_sizes() -> None:
    assert (FULL.grows, FULL.width, FULL.row_bytes, str(FULL)) == (True, 6, 48, "a table of float64[*, 2, 3]")
    fixed = kv.Table(shape=(10, 3))
    assert (fixed.grows, fixed.width, fixed.row_bytes, str(fixed)) == (False, 3, 12, "a table of float32[10, 3]")
    assert [fixed.rows_of(stripe, 4) for stripe in range(4)] == [3, 3, 2, 2]
    assert sum(kv.Table(shape=(2, 3)).rows_of(stripe, 4) for stripe in range(4)) == 2
    assert FULL.rows_of(0, 4) == 0


@pytest.mark.parametrize("dtype", [np.float32, np.dtype("float32"), torch.float32, "float32", np.zeros(1, "f4").dtype])
def test_dtypes_of_any_library(dtype: Any) -> None:
    assert kv.Table(dim=2, dtype=dtype).dtype == "float32"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "give one of them"),
        ({"shape": (3, 2), "dim": 2}, "give one of them"),
        ({"shape": (3,)}, r"\(rows, columns\) at least, not \(3,\)"),
        ({"dim": 0}, "1 to 1048576 elements"),
        ({"dim": 2**21}, "1 to 1048576 elements"),
        ({"dim": 2, "dtype": "int32"}, "dtype int32 of a table must be float32, float64"),
        ({"dim": 2, "init": "ones"}, "init='ones'.*constant, normal, uniform, zeros"),
        ({"dim": 2, "scale": float("inf")}, "finite number"),
        ({"dim": 2, "scale": True}, "finite number"),
        ({"dim": 2, "seed": -1}, "seed=-1"),
        ({"dim": 2, "seed": 1.5}, "seed=1.5 of a table must be an integer"),
        ({"dim": 2, "admit": 3}, "admit=3 must be MinCount"),
        ({"dim": 2, "evict": [3]}, r"evict=\[3\] must be Unseen"),
        ({"dim": 2, "evict": [kv.Unseen(1)] * 9}, "short list"),
        ({"dim": 2, "codec": "topk"}, "codec='topk'.*bf16, fp16, int8, none"),
        ({"shape": (3, 2), "admit": kv.MinCount(2)}, "keeps all its rows"),
        ({"shape": (3, 2), "evict": kv.Unseen(2)}, "keeps all its rows"),
    ],
)
def test_what_there_cannot_be(options: Any, text: str) -> None:
    with pytest.raises(kv.UsageError, match=text):
        kv.Table(**options)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: kv.MinCount(0), r"MinCount\(count\)=0 must be an integer from 1"),
        (lambda: kv.MinCount(2.0), "MinCount"),
        (lambda: kv.Probability(0.0), "above 0 and at most 1"),
        (lambda: kv.Probability(1.5), "above 0 and at most 1"),
        (lambda: kv.Unseen(0), "Unseen"),
        (lambda: kv.Capacity(0), "Capacity"),
        (lambda: kv.Capacity(5, by="size"), "by='size'.*age, count"),
    ],
)
def test_rules_that_there_cannot_be(make: Any, text: str) -> None:
    with pytest.raises(kv.UsageError, match=text):
        make()


def test_a_table_may_be_larger_than_any_array_of_a_worker() -> None:
    spec = TableSpec.of(kv.Table(shape=(2**40, 64)))
    assert (spec.shape, spec.dtype) == ((2**40, 64), "float32")
    with pytest.raises(kv.UsageError, match=r"2\^48"):
        TableSpec.of(kv.Table(shape=(2**47, 4)))
