"""Rounds whose contributions have weights: the mean is by weight, and with equal weights it has the usual bits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from asking import Desk, Worker, floats, optimized, sent
from hosting import Host, total
from pairs import Pair

from kvstore import wire
from kvstore.codecs import parse
from kvstore.codecs.options import travelling
from kvstore.errors import WireError
from kvstore.values import to_buffer

HALVES = [torch.float16, torch.bfloat16]


def mean(desk: type[Desk] = Desk, workers: int = 2, size: int = 1, dtype: Any = torch.float32, **rule: Any) -> Any:
    """A store whose rounds subtract the mean over workers."""
    values = {1: torch.zeros(size, dtype=dtype)}
    return optimized(desk(workers, values=values, **rule), lr=1 / workers)


def push(desk: Desk, worker: Worker, value: Any, weight: float | None, clock: int = 1) -> Any:
    value = value if isinstance(value, torch.Tensor) else floats(value)
    return desk.ask(worker, worker.push({1: value}, clock, weight=weight))


@pytest.mark.parametrize(
    ("weights", "value"), [((1, 3), -7), ((None, 3.0), -7), ((0, 5), -8)], ids=["by weight", "none is 1", "0"]
)
def test_the_mean_is_by_weight(weights: tuple[float | None, float], value: float):
    desk, a, b = mean().and_workers()
    push(desk, a, 4, weights[0])
    push(desk, b, 8, weights[1])
    assert desk.value(clock=1).tolist() == [value]


def test_without_an_optimizer_the_sum_is_by_weight():
    desk, a, b = Desk(2, values={1: floats(0)}).and_workers()
    push(desk, a, 4, 1)
    push(desk, b, 8, 3)
    assert desk.value(clock=1).tolist() == [14]


@pytest.mark.parametrize("rule", [{}, {"quorum": 3}, {"quorum": 3, "late": "keep", "grace": 1.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES], ids=str)
def test_equal_weights_change_no_bit(dtype: torch.dtype, rule: dict[str, Any]):
    """In the first round by the general way, in the others by the shortcut, where the store has one."""
    found = []
    for weights in ([None] * 3, [7.0] * 3, [1 / 3] * 3, [0.0] * 3):
        desk = mean(workers=3, size=1000, dtype=dtype, **rule)
        noise = torch.Generator().manual_seed(1)
        for clock in (1, 2, 3):
            for worker, weight in zip(desk.workers, weights, strict=True):
                push(desk, worker, torch.randn(1000, generator=noise).to(dtype), weight, clock)
        found.append(desk.value(clock=3))
    assert all(torch.equal(each, found[0]) for each in found)


def test_weights_count_in_the_shortcut_of_pushes_that_repeat_themselves():
    desk, a, b = mean().and_workers()
    for clock, weight in enumerate((1.0, 1.0, 3.0), 1):
        push(desk, a, 4, 1.0, clock)
        push(desk, b, 8, weight, clock)
    assert desk.value(clock=3).tolist() == [-(6 + 6 + 7)]


def test_one_that_has_joined_counts_as_unchanged_whatever_the_weights():
    desk, a, b, c, d = mean(workers=4).and_workers()
    desk.ask(d, d.pause({1: 0}))
    desk.ask(c, c.pause({1: 0}))
    push(desk, a, 4, 1)
    push(desk, b, 8, 3)
    assert desk.value(clock=1).tolist() == [-3.5], "half of 7"


def test_a_quorum_takes_the_mean_by_weight_of_those_that_came():
    desk, a, b, _ = mean(workers=3, quorum=2).and_workers()
    push(desk, a, 4, 1)
    push(desk, b, 8, 3)
    assert desk.value(clock=1).tolist() == pytest.approx([-7])


def test_a_late_contribution_keeps_its_weight():
    desk, a, b, c, _ = mean(workers=4, quorum=2, late="keep").and_workers()
    push(desk, a, 0, 1)
    push(desk, b, 0, 1)
    push(desk, c, 16, 6)
    push(desk, a, 2, 1, 2)
    push(desk, b, 4, 1, 2)
    assert desk.value(clock=2).tolist() == [-(6 * 16 + 2 + 4) / 8]


def test_a_standby_makes_the_same_of_it():
    pair = mean(Pair, 4, 300, quorum=2, late="keep")
    noise = torch.Generator().manual_seed(2)
    for clock in (1, 2, 3):
        for worker, weight in zip(pair.workers[:3], (1.5, 2.0, 7.0), strict=True):  # the last one is late each time
            push(pair, worker, torch.randn(300, generator=noise), weight, clock)
    pair.require_same()
    values = []
    for shard in (pair.shard, pair.standby):  # the contribution that was kept, too
        pair.shard = shard
        for worker, weight in zip(pair.workers[:2], (1.5, 2.0), strict=True):
            push(pair, worker, torch.ones(300), weight, 4)
        values.append(pair.value(clock=4))
    assert torch.equal(*values)


def test_cuts_change_no_bit():
    found = []
    for cut in (1000, 256):
        desk = optimized(Desk(2, values={1: torch.zeros(cut), 2: torch.zeros(1000 - cut)}), lr=0.5)
        noise = torch.Generator().manual_seed(3)
        for worker, weight in zip(desk.workers, (3.7, 1.1), strict=True):
            value = torch.randn(1000, generator=noise)
            desk.ask(worker, worker.push({1: value[:cut], 2: value[cut:]}, weight=weight))
        found.append(torch.cat([desk.value(1, 1), desk.value(2, 1)]))
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_has_its_weights_in_float32(dtype: torch.dtype):
    desk, a, b = mean(dtype=dtype).and_workers()
    push(desk, a, torch.tensor([512.0], dtype=dtype), 1000)
    push(desk, b, torch.tensor([256.0], dtype=dtype), 3000)
    assert desk.value(clock=1).tolist() == [-320]


def test_integers_have_no_weights():
    desk, a, b = Desk(2, values={1: torch.zeros(1, dtype=torch.int32)}).and_workers()
    push(desk, a, torch.tensor([4], dtype=torch.int32), 1)
    push(desk, b, torch.tensor([8], dtype=torch.int32), 3)
    assert desk.value(clock=1).tolist() == [12]


def test_what_is_compressed_has_its_weight():
    desk, a, b = mean(size=4).and_workers()
    for worker, value, weight in ((a, 4.0, 1), (b, 8.0, 3)):
        message = worker.push({1: torch.full((4,), value)}, weight=weight)
        payload = to_buffer(torch.full((4,), value, dtype=torch.float16))
        codec = travelling(parse({"type": "fp16"}))
        desk.ask(worker, dataclasses.replace(message, codec=codec, lengths=[8], buffers=[payload]))
    assert desk.value(clock=1).tolist() == [-7] * 4


def test_a_bucket_that_is_split_keeps_the_weights():
    desk = optimized(Desk(2, values={1: floats(0), 2: floats(0)}), lr=0.5)
    _, a, b = desk.and_workers()
    desk.ask(a, a.push({1: floats(4), 2: floats(4)}, weight=1.0))
    desk.ask(b, b.push({1: floats(8)}, weight=3.0))
    assert desk.value(1, clock=1).tolist() == [-7]


@pytest.mark.parametrize("weight", [-1, float("inf"), float("nan"), True, "1"])
def test_a_weight_that_is_none_is_refused(weight: Any):
    with pytest.raises(WireError, match=r"Push.weight: expected a"):
        sent(Worker().push({1: floats(1)}, weight=weight))


# ---- on hosts that sum first


def test_a_host_sums_what_has_one_weight():
    host = Host()
    for rank in (2, 3):
        host.push(rank, {1: [rank, 1]}, weight=5.0)
    exchange = host.take()
    assert (total(exchange), exchange.fields["weight"], exchange.fields["ranks"]) == ([5, 2], 5.0, [2, 3])


def test_a_host_passes_on_what_has_different_weights():
    host = Host()
    for rank in (2, 3):
        host.push(rank, {1: [rank, 1]}, weight=float(rank))
    assert [(each.fields["ranks"], each.fields["weight"]) for each in host.sent] == [([2], 2.0), ([3], 3.0)]


def test_the_sum_of_a_host_weighs_for_each_of_its_workers():
    desk = mean(workers=4, aggregated=[(0, 1), (2, 3)])
    for host, ranks, value, weight in zip(desk.aggregators, ([0, 1], [2, 3]), (8, 32), (1.0, 3.0), strict=True):
        desk.ask(host, host.push({1: floats(value)}, ranks=ranks, weight=weight))
    assert desk.value(clock=1).tolist() == [-(8 + 3 * 32) / 8]


def test_a_lent_push_has_its_weight():
    push_ = Worker().push({1: floats(1)}, weight=2.5)
    assert wire.PushLent.of(push_, 1).plain().weight == 2.5
