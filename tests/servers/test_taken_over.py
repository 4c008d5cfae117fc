"""Primaries die at any point: workers repeat what has no answer, and it ends as if nothing had happened, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import handed_over
import numpy as np
import torch
from asking import Worker, sent
from asking_rows import init_tables, pull_rows, push_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import Records, copied, rows_of

from kvstore import wire
from kvstore.table import Capacity, MinCount, Table, Unseen
from servers.replication.standby import Backlog
from servers.shard import Shard

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


SIZES = {1: 3, 2: 64, 3: 1}


class Script:
    """What one worker does: rounds of pushes, now and then a pull, then it joins; and once more."""

    def __init__(self, rank: int, draw: Callable[[st.SearchStrategy[Any]], Any], whole: bool, rounds: list[int]):
        self.worker = Worker(rank)
        self.clocks = dict.fromkeys(SIZES, 0)
        self.outstanding: dict[int, wire.Request] = {}
        self.whole = whole  # whether gradients are whole numbers
        self.steps: list[tuple[str, list[int], bool]] = []
        for number in rounds:
            for _ in range(number):
                for ids in draw(st.sampled_from([[[1, 2, 3]], [[1], [2, 3]], [[3, 2], [1]]])):
                    self.steps.append(("push", ids, draw(st.booleans())))
                    if draw(st.integers(0, 5)) == 0:
                        self.steps.append(("pull", ids, True))
            self.steps.append(("pause", list(SIZES), True))
        self.steps.reverse()

    @property
    def ready(self) -> bool:
        """Whether it may send its next request: as many as a round has may be under way, but none beside ``join``."""
        under_way = self.outstanding.values()
        if not self.steps or any(isinstance(request, wire.Pause) for request in under_way):
            return False
        return not under_way if self.steps[-1][0] == "pause" else len(under_way) < 4

    def next(self) -> wire.Request:
        kind, ids, want = self.steps.pop()
        worker = self.worker
        worker.done = min(self.outstanding, default=worker.seq + 1)
        request: wire.Request
        if kind == "push":
            for number in ids:
                self.clocks[number] += 1
            request = self.push(ids, [self.clocks[number] for number in ids], want)
        elif kind == "pull":
            request = self.pull(ids, [self.clocks[number] for number in ids])
        else:
            request = worker.pause(dict(self.clocks))
        self.outstanding[request.seq] = request
        return request

    def init(self) -> wire.Request:
        return self.worker.init({number: torch.arange(size).float() for number, size in SIZES.items()})

    def push(self, ids: list[int], clocks: list[int], want: bool) -> wire.Request:
        values = {number: self.gradient(number, clock) for number, clock in zip(ids, clocks, strict=True)}
        return self.worker.push(values, clocks, want=want, rescale=0.5)

    def pull(self, ids: list[int], clocks: list[int]) -> wire.Request:
        return self.worker.pull(ids, clocks)

    def gradient(self, number: int, clock: int) -> torch.Tensor:
        draws = torch.Generator().manual_seed(10_000 * self.worker.rank + 100 * number + clock)
        if self.whole:
            return torch.randint(1, 9, (SIZES[number],), generator=draws).float()
        return torch.randn(SIZES[number], generator=draws)

    def hear(self, reply: wire.Reply) -> None:
        request = self.outstanding.pop(reply.seq, None)
        assert not isinstance(reply, wire.Failure), reply
        if request is not None and isinstance(reply, wire.Resume):
            for number, clock in zip(SIZES, reply.clocks, strict=True):
                self.clocks[number] = max(self.clocks[number], clock)


class Servers:
    """A primary and perhaps a standby, the gate between them and the workers, and the workers."""

    def __init__(self, scripts: list[Script], rule: dict[str, Any], optimizer: tuple[str | None, dict[str, Any]]):
        self.scripts = scripts
        self.count = len(scripts)
        self.records = Records(shares=True)
        self.backlog = Backlog()
        self.held: list[tuple[int, bytes, wire.Reply]] = []
        self.stored = 0
        self.primary = Shard(0, self.count)
        self.standby: Shard | None = None
        for script in scripts:
            self.begin(script, script.worker.open(**rule))
        first = scripts[0]
        self.begin(first, first.init())
        if optimizer[0] is not None:
            self.begin(first, first.worker.set_optimizer(optimizer[0], 1.0 if first.whole else 0.1, **optimizer[1]))

    def begin(self, script: Script, request: wire.Request) -> None:
        script.outstanding[request.seq] = request
        self.ask(script, request)

    def ask(self, script: Script, request: wire.Request) -> None:
        for peer, reply in self.primary.handle(script.worker.peer, sent(request)):
            self.held.append((len(self.records), peer, reply))
        self.deliver()

    def deliver(self) -> None:
        while self.held and (self.standby is None or self.held[0][0] <= self.stored):
            _, peer, reply = self.held.pop(0)
            (script,) = [script for script in self.scripts if script.worker.peer == peer]
            script.hear(sent(reply))

    def store(self, number: int) -> None:
        if self.standby is not None:
            for record in self.records[self.stored : self.stored + number]:
                self.backlog.add(sent(record))
                self.stored += 1
                self.apply(self.standby)
            self.deliver()

    def apply(self, standby: Shard) -> None:
        while (due := self.backlog.take()) is not None:
            standby.apply(due)

    def pair(self) -> None:
        if self.standby is None:
            self.records, self.stored, self.backlog = Records(shares=True), 0, Backlog()
            self.standby = copied(self.primary, self.count)
            self.primary.record(self.records)

    def crash(self) -> None:
        """The primary dies, with the records and answers that have not left it."""
        if self.standby is not None:
            self.backlog.hurry()
            self.apply(self.standby)
            self.primary, self.standby = self.standby, None
            self.records, self.stored, self.held = Records(shares=True), 0, []
            for script in self.scripts:
                for request in list(script.outstanding.values()):
                    self.ask(script, request)

    def finish(self) -> dict[Any, Any]:
        """Do all that is left; return values and the optimizer's states, and all of each table."""
        while any(script.steps or script.outstanding for script in self.scripts):
            self.store(len(self.records))
            ready = [script for script in self.scripts if script.ready]
            assert ready or not any(script.outstanding for script in self.scripts), "all wait for each other"
            for script in ready:
                self.ask(script, script.next())
        served = self.primary.stores[0]
        tables = {target.number: rows_of(target.table) for target in served.buckets.tables}
        if tables:
            return tables
        ended: dict[Any, torch.Tensor] = {number: served.buckets.value(number) for number in SIZES}
        if served.updates.updater is not None:
            ended |= served.updates.updater.states.of(SIZES)
        return {name: value.tolist() for name, value in ended.items()}


def disturbed(
    data: st.DataObject,
    plans: list[list[int]],
    mode: str,
    optimizer: tuple[str | None, dict[str, Any]],
    script: type[Script] = Script,
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Run the same scripts twice: servers die at any moments, and not at all. Return how each has ended.

    Args:
        plans: by worker, how many rounds there are before each ``join``.
        mode: ``sync``, ``async`` or ``ssp``.
        optimizer: its name and hyper-parameters.
        script: what workers do.
    """
    rule: dict[str, Any] = {"mode": "sync"} if mode == "sync" else {"mode": "async"}
    if mode == "ssp":
        rule["staleness"] = 1
    drawn: list[Any] = []

    def servers(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Servers:
        return Servers([script(rank, draw, mode != "sync", plan) for rank, plan in enumerate(plans)], rule, optimizer)

    def noting(strategy: st.SearchStrategy[Any]) -> Any:
        drawn.append(data.draw(strategy))
        return drawn[-1]

    with handed_over.soon():
        run = servers(noting)
        _disturb(run, data)
        ended = run.finish()
    return ended, servers(lambda _: drawn.pop(0)).finish()


def _disturb(run: Servers, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(0, 40))):
        action = data.draw(st.sampled_from(["ask"] * 5 + ["store"] * 3 + ["pair", "crash"]))
        if action == "ask":
            ready = [each for each in run.scripts if each.ready]
            if ready:
                chosen = data.draw(st.sampled_from(ready))
                run.ask(chosen, chosen.next())
        elif action == "store":
            run.store(data.draw(st.integers(1, 3)))
        elif action == "pair":
            run.pair()
        else:
            run.crash()


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


@settings(max_examples=12, deadline=None)
@given(st.data(), st.integers(1, 3), st.sampled_from(["sync", "sync", "async", "ssp"]))
def test_an_end_is_that_of_an_undisturbed_run(data: st.DataObject, count: int, mode: str) -> None:
    optimizer = data.draw(st.sampled_from(SYNC)) if mode == "sync" else ("sgd", {})
    ended, undisturbed = disturbed(data, plans_of(data, count, mode), mode, optimizer)
    assert ended == undisturbed


@settings(max_examples=12, deadline=None)
@given(st.data(), st.integers(1, 3), st.sampled_from(["sync", "sync", "async", "ssp"]))
def test_tables_end_as_in_an_undisturbed_run(data: st.DataObject, count: int, mode: str) -> None:
    optimizer = data.draw(st.sampled_from(ROW_RULES)) if mode == "sync" else ("sgd", {})
    both = disturbed(data, plans_of(data, count, mode), mode, optimizer, RowScript)
    # Where each push is an update, their order says when a row was touched last.
    ended, undisturbed = ({key: table if mode == "sync" else table[:3] for key, table in all_.items()} for all_ in both)
    assert ended == undisturbed
