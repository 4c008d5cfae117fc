"""Primaries die at any point: workers repeat what has no answer, and it ends as if nothing had happened, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from asking_rows import init_tables, pull_rows, push_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from taking_over import Script, disturbed

from kvstore import wire
from kvstore.table import Capacity, MinCount, Table, Unseen

SYNC: list[tuple[str | None, dict[str, Any]]] = [
    *((name, hyper) for name in ("sgd", "adam") for hyper in ({}, {"weight_decay": 0.1})),
    ("sgd", {"momentum": 0.9}),
    (None, {}),
]
ROW_RULES: list[tuple[str | None, dict[str, Any]]] = [
    ("sgd", {}),
    ("sgd", {"momentum": 0.9}),
    ("adam", {}),
    ("rowwiseadagrad", {}),
    (None, {}),
]
GROWING = Table(dim=2, init="normal", admit=MinCount(2), evict=[Unseen(3), Capacity(4)])
IDS = range(8)


class RowScript(Script):
    """Pushes rows of three tables. Where the order of updates is not fixed, rows do not come or go by it."""

    @property
    def tables(self) -> dict[int, Table]:
        grows = Table(dim=2) if self.whole else GROWING
        return {1: Table(shape=(8, 3), init="uniform" if not self.whole else "zeros"), 2: grows, 3: Table(dim=1)}

    def init(self) -> wire.Request:
        return init_tables(self.worker, self.tables)

    def push(self, ids: list[int], clocks: list[int], want: bool) -> wire.Request:
        gradients = {number: self.rows(number, clock) for number, clock in zip(ids, clocks, strict=True)}
        return push_rows(self.worker, gradients, clocks, self.wanted(ids, clocks) if want else None, rescale=0.5)

    def pull(self, ids: list[int], clocks: list[int]) -> wire.Request:
        request = pull_rows(self.worker, self.wanted(ids, clocks))
        request.clocks[:] = clocks
        return request

    def rows(self, number: int, clock: int) -> dict[int, list[float]]:
        noise = np.random.default_rng([self.worker.rank, number, clock])
        ids = np.flatnonzero(noise.random(len(IDS)) < 0.5).tolist()
        shape = len(ids), self.tables[number].width
        rows = noise.integers(1, 9, shape) if self.whole else noise.standard_normal(shape)
        return dict(zip(ids, rows.tolist(), strict=True))

    def wanted(self, ids: list[int], clocks: list[int]) -> dict[int, list[int]]:
        return {number: list(IDS)[: clock % 3] for number, clock in zip(ids, clocks, strict=True)}


def plans_of(data: st.DataObject, count: int, mode: str) -> list[list[int]]:
    if mode == "ssp":
        return [[3, 2]] * count  # else one would wait for pushes that never come
    return [[data.draw(st.integers(1, 3)) for _ in range(2)] for _ in range(count)]


@settings(max_examples=25, deadline=None)
@given(st.data(), st.integers(1, 3), st.sampled_from(["sync", "sync", "async", "ssp"]))
def test_an_end_is_that_of_an_undisturbed_run(data: st.DataObject, count: int, mode: str) -> None:
    optimizer = data.draw(st.sampled_from(SYNC)) if mode == "sync" else ("sgd", {})
    ended, undisturbed = disturbed(data, plans_of(data, count, mode), mode, optimizer)
    assert ended == undisturbed


@settings(max_examples=15, deadline=None)
@given(st.data(), st.integers(1, 3), st.sampled_from(["sync", "sync", "async", "ssp"]))
def test_tables_end_as_in_an_undisturbed_run(data: st.DataObject, count: int, mode: str) -> None:
    optimizer = data.draw(st.sampled_from(ROW_RULES)) if mode == "sync" else ("sgd", {})
    both = disturbed(data, plans_of(data, count, mode), mode, optimizer, RowScript)
    # Where each push is an update, their order says when a row was touched last.
    ended, undisturbed = ({key: table if mode == "sync" else table[:3] for key, table in all_.items()} for all_ in both)
    assert ended == undisturbed
