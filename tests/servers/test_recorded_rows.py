"""Whatever a primary is asked about tables, its standby comes to the same rows, bit by bit; see ``test_recorded``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from asking import Worker, sent
from asking_rows import evict, freeze, init_tables, pull_rows, push_rows, put_rows
from hypothesis import event, given, settings
from hypothesis import strategies as st
from pairs import Records, copied, state

from kvstore import wire
from kvstore.table import Capacity, MinCount, Probability, Table, Unseen
from servers.shard import Shard

IDS = range(12)
TABLES = {
    1: Table(shape=(12, 3), init="uniform", seed=5),
    2: Table(dim=2, dtype="float64", init="normal", admit=MinCount(2), evict=[Unseen(4), Capacity(5, by="count")]),
    3: Table(dim=1, admit=Probability(0.5), evict=[Unseen(3), Capacity(6)]),
}
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {}),
    ("sgd", {"momentum": 0.9}),
    ("adam", {}),
    ("adagrad", {}),
    ("ftrl", {}),
]
RULES = st.sampled_from(
    [
        {"mode": "sync"},
        {"mode": "sync", "finite": True},
        {"mode": "sync", "quorum": 1},
        {"mode": "sync", "quorum": 2, "late": "keep"},
        {"mode": "async"},
        {"mode": "async", "staleness": 1, "finite": True},
    ]
)
KINDS = ["push"] * 16 + ["pull"] * 2 + ["pause", "optimizer", "put", "evict", "evict", "freeze"]


@dataclass
class Asked:
    """What workers have asked so far, to ask what may follow."""

    workers: list[Worker]
    clocks: dict[tuple[int, int], int] = field(default_factory=dict)  # by rank and segment
    versions: dict[int, int] = field(default_factory=dict)  # by rank, of set_optimizer


def gradients(draw: st.DrawFn, number: int) -> dict[int, list[float]]:
    ids = sorted(draw(st.sets(st.sampled_from(IDS), max_size=8)))
    width = TABLES[number].width
    noise = np.random.default_rng(draw(st.integers(0, 50)))
    return {each: noise.standard_normal(width).tolist() for each in ids}


@st.composite
def requests(draw: st.DrawFn, asked: Asked, full: bool) -> wire.Message:
    """Anything that a worker may ask next of tables."""
    worker, first = draw(st.sampled_from(asked.workers)), asked.workers[0]
    rank, kind = worker.rank, draw(st.sampled_from(KINDS))
    number = draw(st.sampled_from(list(TABLES)))
    clock = asked.clocks.get((rank, number), 0)
    wanted = {number: sorted(draw(st.sets(st.sampled_from(IDS), max_size=4)))}
    if kind == "push":
        asked.clocks[rank, number] = clock + 1
        dtype = TABLES[number].dtype
        given_rows = {number: gradients(draw, number)}
        lr = draw(st.sampled_from([None, None, 0.25]))
        how = draw(st.sampled_from(["plain", "wanted", "union" if full else "wanted"]))
        return push_rows(
            *(worker, given_rows, clock + 1, wanted if how == "wanted" else None),
            union=how == "union",
            dtype=dtype,
            lr=lr,
            wide=draw(st.booleans()),
        )
    if kind == "pull":
        return pull_rows(worker, wanted, clock)
    if kind == "pause":
        return worker.pause({each: asked.clocks.get((rank, each), 0) for each in TABLES})
    if kind == "optimizer":
        asked.versions[rank] = version = asked.versions.get(rank, 0) + 1
        name, hyper = draw(st.sampled_from(OPTIMIZERS))
        return worker.set_optimizer(name, 0.1, version, **hyper)
    if kind == "put":
        return put_rows(first, 1, gradients(draw, 1), version=draw(st.sampled_from([None, 7])))
    if kind == "evict":
        return evict(first, number, asked.clocks.get((0, number), 0))
    return freeze(worker, number, clock)


@settings(max_examples=25, deadline=None)
@given(st.data(), RULES, st.integers(1, 3))
def test_after_each_record_the_rows_are_the_primarys(data: st.DataObject, rule: dict[str, Any], count: int) -> None:
    workers = [Worker(rank) for rank in range(count)]
    if rule.get("quorum", 0) > count:
        rule = {**rule, "quorum": count}
    asked, full = Asked(workers), rule["mode"] == "sync" and "quorum" not in rule
    records = Records()
    primary, standby = Shard(0, count, recorder=records), Shard(0, count)

    def ask(worker: Worker, message: wire.Message) -> None:
        primary.handle(worker.peer, sent(message))

    for worker in workers:
        ask(worker, worker.open(**rule))
    optimizer = data.draw(st.sampled_from([None, *OPTIMIZERS]))
    if optimizer is not None or rule["mode"] == "async":
        name, hyper = optimizer or OPTIMIZERS[0]
        asked.versions = dict.fromkeys(range(count), 1)
        ask(workers[0], workers[0].set_optimizer(name, 0.1, 1, **hyper))
    ask(workers[0], init_tables(workers[0], TABLES))
    for _ in range(data.draw(st.integers(1, 30))):
        message = data.draw(requests(asked, full))
        ask(asked.workers[message.node.rank], message)
        action = data.draw(st.sampled_from(["compare"] * 3 + ["wait"] * 5 + ["copy"] * 2 + ["leave"]))
        if action == "leave" and count > 1:
            primary.depart([count - 1])
        elif action == "copy":
            standby = copied(primary, count)
            records.clear()
        if action != "wait":
            while records:
                standby.apply(sent(records.pop(0)))
            assert state(standby) == state(primary)
    event(f"{rule}")
