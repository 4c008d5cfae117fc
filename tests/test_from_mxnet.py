"""docs/from-mxnet.md: the numbers that it gives for updates are those of our stores, and of MXNet.

MXNet's column was made with MXNet 1.9.1; see ``mxnet_reference/make.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from mxnet_reference.rows import Row, results, rows
from threaded import ThreadedJob, shared_job

import kvstore as kv

ROWS = rows()
each = pytest.mark.parametrize("row", ROWS, ids=str)


def weights(store: kv.KVStore, row: Row, **options: Any) -> list[float]:
    """The weight in a store after each update."""
    store.set_optimizer(row.optimizer, learning_rate=1.0, **row.options, **options)
    store.init("w", np.array([row.weight], np.float32))
    out = np.zeros(1, np.float32)
    after = []
    for gradient, rate in zip(row.grads, row.rates, strict=True):
        store.set_learning_rate(rate)
        store.pushpull("w", np.array([gradient], np.float32), out)
        after.append(float(out[0]))
    return after


def as_printed(numbers: Sequence[float]) -> Any:
    return pytest.approx(numbers, abs=5.01e-4)


def test_the_table_is_there() -> None:
    assert {row.optimizer for row in ROWS} == {"sgd", "nag", "adagrad", "adadelta", "adam"}


@each
def test_what_the_page_says_of_a_local_store(row: Row) -> None:
    assert weights(kv.create("local"), row) == as_printed(row.here)
    assert row.here != as_printed(row.mxnet), "there is no difference to tell of"


job = shared_job(workers=1, servers=1)


@each
def test_what_the_page_says_of_a_server(row: Row, job: ThreadedJob) -> None:
    assert job.run(lambda store: weights(store, row)) == [as_printed(row.here)]


def test_what_the_page_says_of_mxnet() -> None:
    assert [as_printed(row.mxnet) for row in ROWS] == results()["rows"]


@pytest.mark.parametrize("row", ROWS[:3], ids=str)
def test_the_first_rows_end_as_in_mxnet_with_its_momentum(row: Row) -> None:
    assert weights(kv.create("local"), row, momentum_style="mxnet") == as_printed(row.mxnet)


@pytest.mark.parametrize("name", ["sgd", "nag"])
def test_at_a_constant_rate_there_is_no_difference(name: str) -> None:
    ours = weights(kv.create("local"), Row(name, {"momentum": 0.5}, 0.0, [2, 2, 2], [1, 1, 1], [], []))
    assert ours == ([-2, -5, -8.5] if name == "sgd" else [-3, -6.5, -10.25])  # MXNet 1.9.1's, too
