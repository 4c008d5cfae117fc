"""Bounded staleness, quorums and delay compensation, as workers see them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from threaded import ThreadedJob
from waiting import LONG

from kvstore.errors import UsageError
from kvstore.rule import Rule

SIZES = {"small": 3, "large": 3000}  # the second is cut over the servers


def _begin(store: Any, optimizer: bool = True) -> None:
    if optimizer:
        store.set_optimizer("sgd", learning_rate=1.0)
    store.init(list(SIZES), [torch.zeros(size) for size in SIZES.values()])


def _step(store: Any) -> list[torch.Tensor]:
    outs = [torch.empty(size) for size in SIZES.values()]
    store.pushpull(list(SIZES), [torch.ones(size) for size in SIZES.values()], out=outs)
    return outs


def test_a_fast_worker_waits_for_a_slow_one_and_counts_its_staleness() -> None:
    steps, bound = 12, 2
    done = [0, 0]

    def work(store: Any) -> dict[int, int]:
        _begin(store)
        store.barrier()
        for step in range(steps):
            if store.rank == 1:
                assert gate.wait(LONG)
            _step(store)
            done[store.rank] = step + 1
            if store.rank == 0 and step == bound - 1:
                gate.set()  # until here it needs nobody
            assert done[0] - done[1] <= bound + 1
        return dict(store.statistics().staleness)

    gate = threading.Event()
    with ThreadedJob(2, 2) as job:
        seen = job.run(work, mode="ssp", rule=Rule("async", staleness=bound))
    for counts in seen:
        assert max(counts) <= bound
        assert sum(counts.values()) >= steps
    assert seen[0][bound] > 0


def test_a_straggler_does_not_hold_up_a_quorum() -> None:
    def work(store: Any) -> tuple[float, int]:
        _begin(store, optimizer=False)
        if store.rank == 2:
            assert gate.wait(LONG)
        for _ in range(5 if store.rank < 2 else 1):
            outs = _step(store)
        if store.rank < 2:
            gate.set()
        assert all(torch.all(out == 3.0) for out in outs)
        return float(outs[0][0]), store.statistics().late

    gate = threading.Event()
    with ThreadedJob(3, 2) as job:
        results = job.run(work, rule=Rule(quorum=2))
    assert results[2][1] > 0, "its first pushes came too late"


def test_a_worker_that_was_late_takes_part_again() -> None:
    def work(store: Any) -> int:
        _begin(store, optimizer=False)
        if store.rank == 1:
            assert gate.wait(LONG)
            outs = _step(store)  # too late for round 1, and told so
            store.barrier()
            store.pushpull("small", torch.full((3,), 7.0), out=outs[0])
            return int(outs[0][0])
        for _ in range(3):
            _step(store)
        gate.set()
        store.barrier()
        out = torch.empty(3)
        while store.pull("small", out=out) and out[0] != 14.0:  # 7 stands for both
            pass
        return 14

    gate = threading.Event()
    with ThreadedJob(2, 2) as job:
        assert job.run(work, rule=Rule(quorum=1)) == [14, 14]


def test_compensation_changes_what_two_workers_do_and_not_what_one_does() -> None:
    def work(store: Any) -> torch.Tensor:
        _begin(store)
        outs = [torch.zeros(3)]
        for _ in range(4):
            store.pull("small", out=outs[0])
            store.push("small", torch.full((3,), 0.5))
        store.barrier()
        store.pull("small", out=outs[0])
        return outs[0]

    with ThreadedJob(1, 1) as job:
        plain = job.run(work, mode="async")[0]
    with ThreadedJob(1, 1) as job:
        assert torch.equal(job.run(work, mode="async", rule=Rule("async", compensation=1.0))[0], plain)


def test_a_quorum_of_more_workers_than_there_are() -> None:
    with ThreadedJob(2, 1) as job, pytest.raises(UsageError, match="quorum=3 is more than the 2 workers of this job"):
        job.run(lambda store: None, rule=Rule(quorum=3))
