"""docs/from-mxnet.md: the numbers that it gives for updates are those of our stores, and of the rules that it states.

MXNet's column was made with MXNet 1.9.1: ``mx.optimizer.create(...)``, then ``set_learning_rate`` and ``update``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from threaded import ThreadedJob

import kvstore as kv

PAGE = Path(__file__).parents[1] / "docs" / "from-mxnet.md"
SECTION = "### Where the numbers differ"


class Row(NamedTuple):
    """A row of the table: what is done, and the weight after every update."""

    name: str
    options: dict[str, float]
    weight: float
    gradients: Sequence[float]
    rates: Sequence[float]
    mxnets: Sequence[float]
    ours: Sequence[float]


def rows() -> list[Row]:
    section = PAGE.read_text().partition(SECTION)[2].partition("\n## ")[0]
    found = []
    for line in section.splitlines():
        if line.startswith("| `"):
            what, *cells = line.strip("| ").split(" | ")
            name, *options = re.findall("`(.+?)`", what)
            given = {option: float(value) for option, _, value in (each.partition("=") for each in options)}
            numbers = [[float(number) for number in cell.split(",")] for cell in cells]
            found.append(Row(name, given, numbers[0][0], *numbers[1:]))
    return found


ROWS = rows()
each = pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name}-{row.gradients}-{row.rates}")


def weights(store: kv.KVStore, row: Row) -> list[float]:
    """The weight in a store after each update."""
    store.set_optimizer(row.name, learning_rate=1.0, **row.options)
    store.init("w", np.array([row.weight], np.float32))
    out = np.zeros(1, np.float32)
    after = []
    for gradient, rate in zip(row.gradients, row.rates, strict=True):
        store.set_learning_rate(rate)
        store.pushpull("w", np.array([gradient], np.float32), out)
        after.append(float(out[0]))
    return after


def as_printed(numbers: Sequence[float]) -> Any:
    return pytest.approx(numbers, abs=5.01e-4)


def test_the_table_is_there() -> None:
    assert {row.name for row in ROWS} == {"sgd", "nag", "adagrad", "adadelta"}


@each
def test_what_the_page_says_of_a_local_store(row: Row) -> None:
    assert weights(kv.create("local"), row) == as_printed(row.ours)
    assert row.ours != as_printed(row.mxnets), "there is no difference to tell of"


@pytest.fixture(scope="module")
def job() -> Iterator[ThreadedJob]:
    with ThreadedJob(workers=1, servers=1) as job:
        yield job


@each
def test_what_the_page_says_of_a_server(row: Row, job: ThreadedJob) -> None:
    assert job.run(lambda store: weights(store, row)) == [as_printed(row.ours)]


def sgd(row: Row) -> Iterator[float]:
    m, w = 0.0, row.weight
    for g, lr in zip(row.gradients, row.rates, strict=True):
        m = row.options["momentum"] * m - lr * g
        w += m
        yield w


def adagrad(row: Row) -> Iterator[float]:
    h, w = 0.0, row.weight
    for g, lr in zip(row.gradients, row.rates, strict=True):
        h += g**2
        w -= lr * (g / math.sqrt(h + 1e-7) + row.options.get("wd", 0.0) * w)
        yield w


RULES: dict[str, Callable[[Row], Iterator[float]]] = {"sgd": sgd, "adagrad": adagrad}


@pytest.mark.parametrize("row", [row for row in ROWS if row.name in RULES], ids=str)
def test_the_rules_that_the_page_gives_for_mxnet_make_mxnets_numbers(row: Row) -> None:
    assert list(RULES[row.name](row)) == as_printed(row.mxnets)


@pytest.mark.parametrize("name", ["sgd", "nag"])
def test_at_a_constant_rate_there_is_no_difference(name: str) -> None:
    ours = weights(kv.create("local"), Row(name, {"momentum": 0.5}, 0.0, [2, 2, 2], [1, 1, 1], [], []))
    assert ours == ([-2, -5, -8.5] if name == "sgd" else [-3, -6.5, -10.25])  # MXNet 1.9.1's, too
