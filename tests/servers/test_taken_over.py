"""Primaries die at any point: workers repeat what has no answer, and it ends as if nothing had happened, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from asking import Worker, sent
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import copied

from kvstore.wire import Failure, Message, Pause, Reply, Request, Resume
from servers.shard import Shard

SIZES = {1: 3, 2: 64, 3: 1}
SYNC = [(name, hyper) for name in ("sgd", "adam") for hyper in ({}, {"weight_decay": 0.1})] + [(None, {})]


class Script:
    """What one worker does: rounds of pushes, now and then a pull, then it joins; and once more."""

    def __init__(self, rank: int, draw: Callable[[st.SearchStrategy[Any]], Any], whole: bool, rounds: list[int]):
        self.worker = Worker(rank)
        self.clocks = dict.fromkeys(SIZES, 0)
        self.outstanding: dict[int, Request] = {}
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
        if not self.steps or any(isinstance(request, Pause) for request in under_way):
            return False
        return not under_way if self.steps[-1][0] == "pause" else len(under_way) < 4

    def next(self) -> Request:
        kind, ids, want = self.steps.pop()
        worker = self.worker
        worker.done = min(self.outstanding, default=worker.seq + 1)
        request: Request
        if kind == "push":
            for number in ids:
                self.clocks[number] += 1
            values = {number: self.gradient(number, self.clocks[number]) for number in ids}
            request = worker.push(values, [self.clocks[number] for number in ids], want=want, rescale=0.5)
        elif kind == "pull":
            request = worker.pull(ids, [self.clocks[number] for number in ids])
        else:
            request = worker.pause(dict(self.clocks))
        self.outstanding[request.seq] = request
        return request

    def gradient(self, number: int, clock: int) -> torch.Tensor:
        draws = torch.Generator().manual_seed(10_000 * self.worker.rank + 100 * number + clock)
        if self.whole:
            return torch.randint(1, 9, (SIZES[number],), generator=draws).float()
        return torch.randn(SIZES[number], generator=draws)

    def hear(self, reply: Reply) -> None:
        request = self.outstanding.pop(reply.seq, None)
        assert not isinstance(reply, Failure), reply
        if request is not None and isinstance(reply, Resume):
            for number, clock in zip(SIZES, reply.clocks, strict=True):
                self.clocks[number] = max(self.clocks[number], clock)


class Servers:
    """A primary and perhaps a standby, the gate between them and the workers, and the workers."""

    def __init__(self, scripts: list[Script], rule: dict[str, Any], optimizer: tuple[str | None, dict[str, Any]]):
        self.scripts = scripts
        self.count = len(scripts)
        self.records: list[Message] = []
        self.held: list[tuple[int, bytes, Reply]] = []
        self.stored = 0
        self.primary = Shard(0, self.count)
        self.standby: Shard | None = None
        for script in scripts:
            self.begin(script, script.worker.open(**rule))
        first = scripts[0]
        self.begin(first, first.worker.init({n: torch.arange(size).float() for n, size in SIZES.items()}))
        if optimizer[0] is not None:
            self.begin(first, first.worker.set_optimizer(optimizer[0], 1.0 if first.whole else 0.1, **optimizer[1]))

    def begin(self, script: Script, request: Request) -> None:
        script.outstanding[request.seq] = request
        self.ask(script, request)

    def ask(self, script: Script, request: Request) -> None:
        for peer, reply in self.primary.handle(script.worker.peer, sent(request)):
            self.held.append((len(self.records), peer, reply))
        self.deliver()

    def deliver(self) -> None:
        """Let the answers go for which all records have been stored."""
        while self.held and (self.standby is None or self.held[0][0] <= self.stored):
            _, peer, reply = self.held.pop(0)
            (script,) = [script for script in self.scripts if script.worker.peer == peer]
            script.hear(sent(reply))

    def store(self, number: int) -> None:
        if self.standby is not None:
            for record in self.records[self.stored : self.stored + number]:
                self.standby.apply(sent(record))
                self.stored += 1
            self.deliver()

    def pair(self) -> None:
        if self.standby is None:
            self.records, self.stored = [], 0
            self.standby = copied(self.primary, self.count)
            self.primary.record(self.records.append)

    def crash(self) -> None:
        """The primary dies, with the records and answers that have not left it."""
        if self.standby is not None:
            self.primary, self.standby = self.standby, None
            self.records, self.stored, self.held = [], 0, []
            for script in self.scripts:
                for request in list(script.outstanding.values()):
                    self.ask(script, request)

    def finish(self) -> dict[Any, torch.Tensor]:
        """Do all that is left; return values and the optimizer's states."""
        while any(script.steps or script.outstanding for script in self.scripts):
            self.store(len(self.records))
            ready = [script for script in self.scripts if script.ready]
            assert ready or not any(script.outstanding for script in self.scripts), "all wait for each other"
            for script in ready:
                self.ask(script, script.next())
        table = self.primary.stores[0]
        ended: dict[Any, torch.Tensor] = {number: table.buckets.value(number) for number in SIZES}
        if table.updates.updater is not None:
            ended |= table.updates.updater.states.of(SIZES)
        return {name: value.clone() for name, value in ended.items()}


@settings(max_examples=25, deadline=None)
@given(st.data(), st.integers(1, 3), st.sampled_from(["sync", "sync", "async", "ssp"]))
def test_an_end_is_that_of_an_undisturbed_run(data: st.DataObject, count: int, mode: str) -> None:
    rule: dict[str, Any] = {"mode": "sync"} if mode == "sync" else {"mode": "async"}
    if mode == "ssp":
        rule["staleness"] = 1
    optimizer = data.draw(st.sampled_from(SYNC)) if mode == "sync" else ("sgd", {})
    plans = [[data.draw(st.integers(1, 3)) for _ in range(2)] for _ in range(count)]
    if mode == "ssp":
        plans = [[3, 2]] * count  # else one would wait for pushes that never come
    drawn: list[Any] = []

    def servers(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Servers:
        return Servers([Script(rank, draw, mode != "sync", plan) for rank, plan in enumerate(plans)], rule, optimizer)

    def noting(strategy: st.SearchStrategy[Any]) -> Any:
        drawn.append(data.draw(strategy))
        return drawn[-1]

    run = servers(noting)
    for _ in range(data.draw(st.integers(0, 40))):
        action = data.draw(st.sampled_from(["ask"] * 5 + ["store"] * 3 + ["pair", "crash"]))
        if action == "ask":
            ready = [script for script in run.scripts if script.ready]
            if ready:
                script = data.draw(st.sampled_from(ready))
                run.ask(script, script.next())
        elif action == "store":
            run.store(data.draw(st.integers(1, 3)))
        elif action == "pair":
            run.pair()
        else:
            run.crash()
    undisturbed = servers(lambda _: drawn.pop(0)).finish()
    ended = run.finish()
    assert ended.keys() == undisturbed.keys()
    assert all(torch.equal(value, undisturbed[name]) for name, value in ended.items())
