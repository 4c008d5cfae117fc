"""Whatever a primary is asked, its standby comes to the same state, bit by bit, from records, a capture, or both."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import handed_over
import numpy as np
import pytest
import torch
from asking import Worker, sent, some_rows
from asking_rows import evict, freeze, init_tables, pull_rows, push_rows, put_rows
from hypothesis import event, given, settings
from hypothesis import strategies as st
from pairs import Records, copied, state

from kvstore import wire
from kvstore.table import Capacity, MinCount, Probability, Table, Unseen
from kvstore.values import RowWindow
from servers.replication.standby import Backlog
from servers.shard import Shard

SIZES = {1: (3,), 2: (64,), 3: (2, 5), 4: (1,)}
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {}),
    ("sgd", {"momentum": 0.9, "weight_decay": 0.01}),
    ("adam", {}),
    ("adamw", {"amsgrad": True}),
    ("lamb", {}),
    ("rmsprop", {"momentum": 0.5}),
    ("adagrad", {"initial_accumulator_value": 0.5}),
]
BACK = [None, None, ["2bit", [["threshold", 0.5]]], ["int8", [["seed", 3], ["stochastic", True]]]]
KINDS = ["push"] * 8 + ["pull"] * 3 + ["pause", "init", "optimizer", "states", "close", "open"]


IDS = range(12)
TABLES = {
    1: Table(shape=(12, 3), init="uniform", seed=5),
    2: Table(dim=2, dtype="float64", init="normal", admit=MinCount(2), evict=[Unseen(4), Capacity(5, by="count")]),
    3: Table(dim=1, admit=Probability(0.5), evict=[Unseen(3), Capacity(6)]),
    4: Table(shape=(12, 3), dtype="float16", init="normal"),
    5: Table(dim=2, dtype="bfloat16", init="uniform", evict=Capacity(6)),
}
ROW_OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {}),
    ("sgd", {"momentum": 0.9}),
    ("adam", {}),
    ("adagrad", {}),
    ("ftrl", {}),
]
ROW_KINDS = ["push"] * 16 + ["pull"] * 2 + ["pause", "optimizer", "put", "evict", "evict", "freeze"]


@dataclass
class Asked:
    """What workers have asked so far, to ask what may follow."""

    workers: list[Worker]
    clocks: dict[tuple[int, int], int] = field(default_factory=dict)  # by rank and segment
    versions: dict[int, int] = field(default_factory=dict)  # by rank, of set_optimizer
    known: set[int] = field(default_factory=set)


RULES: list[dict[str, Any]] = [
    {"mode": "sync"},
    {"mode": "sync", "finite": True},
    {"mode": "sync", "quorum": 1},
    {"mode": "sync", "quorum": 2, "late": "keep"},
    {"mode": "async"},
    {"mode": "async", "staleness": 1, "finite": True},
    {"mode": "async", "compensation": 0.5},
    {"mode": "async", "staleness": 0, "aggregate": "host"},
]
ROW_RULES = RULES[:6]


def numbers(draw: st.DrawFn, number: int, dtype: torch.dtype) -> torch.Tensor:
    seed = draw(st.integers(0, 50))
    values = torch.randn(SIZES[number], generator=torch.Generator().manual_seed(seed))
    return (values * float("nan") if seed == 50 else values).to(dtype)


# Of which elements of which array a segment is: the first, and how many a row has. The first two are of one array.
PLACES = {1: (4, 5), 2: (7, 5), 3: (0, 5), 4: (2, 3)}


def rows_of(draw: st.DrawFn, message: wire.Push, dtype: torch.dtype) -> wire.Push:
    """Return a push of the same segments that has some rows of them."""
    runs: list[list[int]] = []
    places: list[RowWindow] = []
    for before, number in zip([0, *message.ids], message.ids, strict=False):
        (first, width), size = PLACES[number], math.prod(SIZES[number])
        if (before, number) == (1, 2) and draw(st.booleans()):
            runs[-1][0], places[-1] = 2, RowWindow(places[-1].first, places[-1].size + size, width)
        else:
            runs.append([1, first, width])
            places.append(RowWindow(first, size, width))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 50)))
    rows = [
        {
            each: torch.randn(place.width, generator=generator).to(dtype)
            for each in sorted(draw(st.sets(st.integers(place.rows[0], place.rows[1] - 1), max_size=6)))
        }
        for place in places
    ]
    return some_rows(message, runs, rows)


@st.composite
def requests(draw: st.DrawFn, asked: Asked, dtype: torch.dtype) -> wire.Message:
    """Anything that a worker may ask next, and now and then what it may not."""
    worker = draw(st.sampled_from(asked.workers))
    kind = draw(st.sampled_from(KINDS))
    ids = draw(st.sampled_from([[1, 2, 3], [1, 2, 3], [1], [2, 3], [3, 4], [4], [1, 2, 3, 4], [2, 1]]))
    rank = worker.rank
    if kind in ("push", "pull"):
        every = {number: asked.clocks.get((rank, number), 0) for number in ids}
        if kind == "pull":
            return worker.pull(ids, list(every.values()), back=draw(st.sampled_from(BACK)))
        for number in ids:
            asked.clocks[rank, number] = every[number] + 1
        wide = dtype == torch.bfloat16 and draw(st.booleans())
        values = {number: numbers(draw, number, torch.float32 if wide else dtype) for number in ids}
        message = worker.push(
            values,
            [clock + 1 for clock in every.values()],
            want=draw(st.booleans()),
            lr=draw(st.sampled_from([None, None, 0.25])),
            rescale=draw(st.sampled_from([None, 0.5, 0.5])),
            back=draw(st.sampled_from(BACK)),
        )
        message = dataclasses.replace(message, in_float32=wide)
        return rows_of(draw, message, torch.float32 if wide else dtype) if draw(st.booleans()) else message
    if kind == "pause":
        return worker.pause({number: asked.clocks.get((rank, number), 0) for number in sorted(asked.known)})
    if kind == "optimizer":
        asked.versions[rank] = version = asked.versions.get(rank, 0) + 1
        name, hyper = draw(st.sampled_from(OPTIMIZERS))
        return worker.set_optimizer(name, 0.1, version, **hyper)
    first = asked.workers[0]
    if kind == "init":
        asked.known.update(ids)
        return first.init({number: numbers(draw, number, dtype) for number in ids})
    if kind == "states":
        return first.put_states({(1, "momentum_buffer"): torch.ones(SIZES[1])})
    return wire.Close(worker.me(), 0) if kind == "close" else worker.open("sync", finite=True)


def gradients(draw: st.DrawFn, number: int) -> dict[int, list[float]]:
    ids = sorted(draw(st.sets(st.sampled_from(IDS), max_size=8)))
    width = TABLES[number].width
    noise = np.random.default_rng(draw(st.integers(0, 50)))
    return {each: noise.standard_normal(width).tolist() for each in ids}


@st.composite
def row_requests(draw: st.DrawFn, asked: Asked, full: bool) -> wire.Message:
    """Anything that a worker may ask next of tables."""
    worker, first = draw(st.sampled_from(asked.workers)), asked.workers[0]
    rank, kind = worker.rank, draw(st.sampled_from(ROW_KINDS))
    number = draw(st.sampled_from(list(TABLES)))
    clock = asked.clocks.get((rank, number), 0)
    wanted = {number: sorted(draw(st.sets(st.sampled_from(IDS), max_size=4)))}
    if kind == "push":
        asked.clocks[rank, number] = clock + 1
        wide = draw(st.booleans())
        dtype = TABLES[number].sum_dtype if wide else TABLES[number].dtype
        given_rows = {number: gradients(draw, number)}
        lr = draw(st.sampled_from([None, None, 0.25]))
        how = draw(st.sampled_from(["plain", "wanted", "union" if full else "wanted"]))
        return push_rows(
            *(worker, given_rows, clock + 1, wanted if how == "wanted" else None),
            union=how == "union",
            dtype=dtype,
            in_float32=wide,
            lr=lr,
            wide=draw(st.booleans()),
        )
    if kind == "pull":
        return pull_rows(worker, wanted, clock)
    if kind == "pause":
        return worker.pause({each: asked.clocks.get((rank, each), 0) for each in TABLES})
    if kind == "optimizer":
        asked.versions[rank] = version = asked.versions.get(rank, 0) + 1
        name, hyper = draw(st.sampled_from(ROW_OPTIMIZERS))
        return worker.set_optimizer(name, 0.1, version, **hyper)
    if kind == "put":
        return put_rows(first, 1, gradients(draw, 1), version=draw(st.sampled_from([None, 7])))
    if kind == "evict":
        return evict(first, number, asked.clocks.get((0, number), 0))
    return freeze(worker, number, clock)


@pytest.fixture(autouse=True, scope="module")
def _handed_over_soon() -> Iterator[None]:
    with handed_over.soon():
        yield


class Compared:
    """A primary whose standby comes to the same state from its records, or from a capture and later records."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any], rule: dict[str, Any], count: int) -> None:
        self.draw = draw
        self.rule = {**rule, "quorum": count} if rule.get("quorum", 0) > count else rule
        self.asked = Asked([Worker(rank) for rank in range(count)])
        self.first = self.asked.workers[0]
        self.records = Records(shares=draw(st.booleans()))
        self.primary, self.standby = Shard(0, count, recorder=self.records), Shard(0, count)
        self.backlog = Backlog()
        for worker in self.asked.workers:
            self.ask(worker.open(**self.rule))

    def ask(self, message: Any) -> None:
        self.primary.handle(self.asked.workers[message.node.rank].peer, sent(message))

    def set_optimizer(self, optimizers: list[tuple[str, dict[str, Any]]]) -> None:
        optimizer = self.draw(st.sampled_from([None, *optimizers]))
        if optimizer is not None or self.rule["mode"] == "async":
            name, hyper = optimizer or optimizers[0]
            self.asked.versions = dict.fromkeys(range(len(self.asked.workers)), 1)
            self.ask(self.first.set_optimizer(name, 0.1, 1, **hyper))

    def run(self, requests: st.SearchStrategy[wire.Message], most: int) -> None:
        count = len(self.asked.workers)
        for _ in range(self.draw(st.integers(1, most))):
            self.ask(self.draw(requests))
            action = self.draw(st.sampled_from(["compare"] * 2 + ["wait"] * 4 + ["copy", "leave"]))
            if action == "leave" and count > 1:
                self.primary.depart([count - 1])
            elif action == "copy":
                self.standby, self.backlog = copied(self.primary, count), Backlog()
                self.records.clear()
            while self.records:
                self.backlog.add(sent(self.records.pop(0)))
            if action != "wait":
                self.backlog.hurry()
            while (due := self.backlog.take()) is not None:
                self.standby.apply(due)
            if action != "wait":
                assert state(self.standby) == state(self.primary)
        event(f"{self.rule}")


@settings(max_examples=25, deadline=None)
@given(
    st.data(),
    st.sampled_from(RULES),
    st.integers(1, 3),
    st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
)
def test_after_each_record_the_state_is_the_primarys(
    data: st.DataObject, rule: dict[str, Any], count: int, dtype: torch.dtype
) -> None:
    pair = Compared(data.draw, rule, count)
    for ids in data.draw(st.sampled_from([[[1, 2, 3], [4]], [[1], [2, 3, 4]]])):
        pair.asked.known.update(ids)
        pair.ask(pair.first.init({number: numbers(data.draw, number, dtype) for number in ids}))
    pair.set_optimizer(OPTIMIZERS)
    pair.run(requests(pair.asked, dtype), 25)


@settings(max_examples=15, deadline=None)
@given(st.data(), st.sampled_from(ROW_RULES), st.integers(1, 3))
def test_after_each_record_the_rows_are_the_primarys(data: st.DataObject, rule: dict[str, Any], count: int) -> None:
    pair = Compared(data.draw, rule, count)
    pair.set_optimizer(ROW_OPTIMIZERS)
    pair.ask(init_tables(pair.first, TABLES))
    pair.run(row_requests(pair.asked, rule["mode"] == "sync" and "quorum" not in rule), 30)
