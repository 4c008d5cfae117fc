"""Gradients that an aggregator reads from where they lie; files in memory stand in for devices."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from threaded import ThreadedJob

from kvstore.client import DistStore
from kvstore.devices import CannotLend, HostMemory, Lent
from kvstore.rule import Rule

SIZES = {"a": 3000, "b": 7, "c": 500}


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThreadedJob]:
    with ThreadedJob(
        workers=3, servers=2, aggregators=1, bigarray_bound=1000, piece_bytes=4096, device_sum="host"
    ) as cluster:
        yield cluster


def gradients(rank: int, number: int) -> list[torch.Tensor]:
    """What a worker pushes: sums of these depend on their order."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    return [torch.randn(size, generator=generator) * 10.0 ** (rank * 3) for size in SIZES.values()]


def rounds(store: DistStore, count: int = 4) -> list[list[torch.Tensor]]:
    """Push and pull some rounds; return the values after each."""
    store.init(list(SIZES), [torch.zeros(size) for size in SIZES.values()])
    values = []
    for number in range(count):
        outs = [torch.empty(size) for size in SIZES.values()]
        store.pushpull(list(SIZES), gradients(store.rank, number), out=outs)
        values.append(outs)
    return values


def counted(store: DistStore) -> tuple[Any, Any]:
    return rounds(store), store.statistics()


def same(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    pairs = zip(itertools.chain(*one), itertools.chain(*other), strict=True)
    return all(torch.equal(first, second) for first, second in pairs)


def test_sums_have_the_bits_of_those_in_shared_memory(cluster: ThreadedJob):
    usual = cluster.run(rounds)
    lent = cluster.run(counted, on_device=True)
    total = sum(4 * size for size in SIZES.values())
    for rank, (values, statistics) in enumerate(lent):
        assert same(values, usual[rank])
        assert statistics.not_lent == ""
        assert 2 * total <= statistics.bytes_lent <= 3 * total, "the first round comes before the memory is open"
        assert statistics.bytes_pushed == 4 * total


def test_keys_that_are_pushed_one_by_one_are_lent(cluster: ThreadedJob):
    def work(store: DistStore) -> tuple[int, str]:
        store.init(list(SIZES), [torch.zeros(size) for size in SIZES.values()])
        for _ in range(4):
            for key, size in SIZES.items():
                store.pushpull(key, torch.ones(size), out=torch.empty(size))
        return store.statistics().bytes_lent, store.statistics().not_lent

    total = sum(4 * size for size in SIZES.values())
    for lent, refusal in cluster.run(work, on_device=True):
        assert 2 * total <= lent <= 3 * total
        assert refusal == ""


def test_pushes_under_way_do_not_share_memory(cluster: ThreadedJob):
    def work(store: DistStore) -> tuple[list[float], int]:
        store.init("w", torch.zeros(600))
        outs = [torch.empty(600) for _ in range(12)]
        value = torch.empty(600)
        tickets = []
        for number, out in enumerate(outs):
            value.fill_(number + 1.0)
            tickets.append(store.pushpull("w", value, out=out, wait=False))
            if number % 2:  # two are under way, and the caller changes its array meanwhile
                tickets[-2].wait()
                tickets[-1].wait()
        return [float(out.unique().item()) for out in outs[1::2]], store.statistics().bytes_lent

    for values, lent in cluster.run(work, on_device=True):
        assert values == [3.0 * number for number in range(2, 13, 2)]
        assert lent >= 600 * 4 * 2


def test_what_is_compressed_and_what_is_empty_goes_the_usual_way(cluster: ThreadedJob):
    def work(store: DistStore) -> tuple[float, int, str]:
        store.init(["w", "none"], [torch.zeros(8), torch.zeros(0)])
        out = torch.empty(8)
        for _ in range(3):
            store.pushpull(["w", "none"], [torch.ones(8), torch.ones(0)], out=[out, torch.empty(0)])
        store.set_gradient_compression({"type": "fp16"})
        for _ in range(3):
            store.pushpull("w", torch.ones(8), out=out)
        return float(out[0]), store.statistics().bytes_lent, store.statistics().not_lent

    assert cluster.run(work, on_device=True) == [(3.0, 0, "what is pushed is compressed")] * 3


def test_other_stores_lend_nothing(cluster: ThreadedJob):
    for _, statistics in cluster.run(counted):
        assert (statistics.bytes_lent, statistics.not_lent) == (0, "")


def test_a_push_that_is_not_finite_is_refused_by_name(cluster: ThreadedJob):
    def work(store: DistStore) -> str:
        store.init("w", torch.zeros(4))
        out = torch.empty(4)
        for _ in range(3):
            store.pushpull("w", torch.ones(4), out=out)
        try:
            store.pushpull("w", torch.full((4,), float("nan") if store.rank == 1 else 1.0), out=out)
        except ArithmeticError as exc:
            return str(exc)
        return "no error"

    for text in cluster.run(work, rule=Rule(finite=True), on_device=True):
        assert "worker 1" in text


def test_a_late_worker_holds_up_nobody(cluster: ThreadedJob):
    def work(store: DistStore) -> int:
        store.init("w", torch.zeros(4))
        for _ in range(3):
            store.pushpull("w", torch.ones(4), out=torch.empty(4))
        return store.statistics().bytes_lent

    assert all(cluster.run(work, rule=Rule(quorum=2), on_device=True))


@pytest.mark.parametrize("where", ["lend", "open"])
def test_without_lent_memory_pushes_go_the_usual_way(cluster: ThreadedJob, monkeypatch: pytest.MonkeyPatch, where: str):
    def refuse(*_: Any) -> None:
        raise CannotLend("there is no peer access")

    usual = cluster.run(rounds)
    monkeypatch.setattr(HostMemory, where, refuse)
    for rank, (values, statistics) in enumerate(cluster.run(counted, on_device=True)):
        assert same(values, usual[rank])
        assert (statistics.bytes_lent, statistics.not_lent) == (0, "there is no peer access")


def test_one_worker_that_cannot_lend_is_summed_with_the_others(cluster: ThreadedJob, monkeypatch: pytest.MonkeyPatch):
    usual, lend = cluster.run(rounds), HostMemory.lend

    def lends(memory: HostMemory, nbytes: int, device: torch.device) -> Lent:
        if threading.current_thread().name == "worker 1":
            raise CannotLend("this one cannot")
        return lend(memory, nbytes, device)

    monkeypatch.setattr(HostMemory, "lend", lends)
    found = cluster.run(counted, on_device=True)
    assert [bool(statistics.bytes_lent) for _, statistics in found] == [True, False, True]
    assert all(same(values, usual[rank]) for rank, (values, _) in enumerate(found))


def test_sums_over_devices_of_half_precision_are_lent_in_float32(cluster: ThreadedJob):
    def work(store: DistStore) -> tuple[list[float], int]:
        store.set_optimizer("sgd", learning_rate=2.0**-17, rescale_grad=1 / 3)
        store.init(["h", "i"], [torch.zeros(1500, dtype=torch.float16), torch.zeros(9, dtype=torch.float16)])
        for _ in range(4):  # the first ones have no lent memory yet
            values = [[torch.full((size,), 40_000.0).half()] * 2 for size in (1500, 9)]
            outs = [torch.empty(size, dtype=torch.float16) for size in (1500, 9)]
            store.pushpull(["h", "i"], values, outs)
        lent = store.statistics().bytes_lent
        return [*outs[0].unique().tolist(), *outs[1].unique().tolist()], lent

    expected = torch.tensor(-4 * 80_000 * 2.0**-17).half().item()
    for values, lent in cluster.run(work, on_device=True):
        assert values == [expected, expected]
        assert lent
        assert lent % (4 * 1509) == 0
