"""Whatever a primary is asked, its standby comes to the same state, bit by bit, from records, a capture, or both."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import handed_over
import pytest
import torch
from asking import Worker, sent
from hypothesis import event, given, settings
from hypothesis import strategies as st
from pairs import Records, copied, state

from kvstore import wire
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
]
BACK = [None, None, ["2bit", [["threshold", 0.5]]], ["int8", [["seed", 3], ["stochastic", True]]]]
KINDS = ["push"] * 8 + ["pull"] * 3 + ["pause", "init", "optimizer", "states", "close", "open"]


@dataclass
class Asked:
    """What workers have asked so far, to ask what may follow."""

    workers: list[Worker]
    clocks: dict[tuple[int, int], int] = field(default_factory=dict)  # by rank and segment
    versions: dict[int, int] = field(default_factory=dict)  # by rank, of set_optimizer
    known: set[int] = field(default_factory=set)


RULES = st.sampled_from(
    [
        {"mode": "sync"},
        {"mode": "sync", "finite": True},
        {"mode": "sync", "quorum": 1},
        {"mode": "sync", "quorum": 2, "late": "keep"},
        {"mode": "async"},
        {"mode": "async", "staleness": 1, "finite": True},
        {"mode": "async", "compensation": 0.5},
        {"mode": "async", "staleness": 0, "aggregate": "host"},
    ]
)


def numbers(draw: st.DrawFn, number: int, dtype: torch.dtype) -> torch.Tensor:
    seed = draw(st.integers(0, 50))
    values = torch.randn(SIZES[number], generator=torch.Generator().manual_seed(seed))
    return (values * float("nan") if seed == 50 else values).to(dtype)


@st.composite
def requests(draw: st.DrawFn, asked: Asked, dtype: torch.dtype) -> wire.Message:
    """Anything that a worker may ask next, and now and then what it may not."""
    worker = draw(st.sampled_from(asked.workers))
    kind = draw(
        st.sampled_from(["push"] * 8 + ["pull"] * 3 + ["pause", "init", "optimizer", "states", "close", "open"])
    )
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
        return dataclasses.replace(message, in_float32=wide)
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


@pytest.fixture(autouse=True, scope="module")
def _handed_over_soon() -> Iterator[None]:
    with handed_over.soon():
        yield


@settings(max_examples=40, deadline=None)
@given(st.data(), RULES, st.integers(1, 3), st.sampled_from([torch.float32, torch.float32, torch.bfloat16]))
def test_after_each_record_the_state_is_the_primarys(
    data: st.DataObject, rule: dict[str, Any], count: int, dtype: torch.dtype
) -> None:
    workers = [Worker(rank) for rank in range(count)]
    if rule.get("quorum", 0) > count:
        rule = {**rule, "quorum": count}
    asked = Asked(workers)
    records = Records(shares=data.draw(st.booleans()))
    primary, standby, backlog = Shard(0, count, recorder=records), Shard(0, count), Backlog()

    def ask(worker: Worker, message: wire.Message) -> None:
        primary.handle(worker.peer, sent(message))

    for worker in workers:
        ask(worker, worker.open(**rule))
    for ids in data.draw(st.sampled_from([[[1, 2, 3], [4]], [[1], [2, 3, 4]]])):
        asked.known.update(ids)
        ask(workers[0], workers[0].init({number: numbers(data.draw, number, dtype) for number in ids}))
    optimizer = data.draw(st.sampled_from([None, *OPTIMIZERS]))
    if optimizer is not None or rule["mode"] == "async":
        name, hyper = optimizer or OPTIMIZERS[0]
        asked.versions = dict.fromkeys(range(count), 1)
        ask(workers[0], workers[0].set_optimizer(name, 0.1, 1, **hyper))
    for _ in range(data.draw(st.integers(1, 25))):
        message = data.draw(requests(asked, dtype))
        ask(asked.workers[message.node.rank], message)
        action = data.draw(st.sampled_from(["compare", "wait", "wait", "wait", "copy", "leave"]))
        if action == "leave" and count > 1:
            primary.depart([count - 1])
        elif action == "copy":
            standby, backlog = copied(primary, count), Backlog()
            records.clear()
        while records:
            backlog.add(sent(records.pop(0)))
        if action != "wait":
            backlog.hurry()
        while (due := backlog.take()) is not None:
            standby.apply(due)
        if action != "wait":
            assert state(standby) == state(primary)
    event(f"{rule}")
