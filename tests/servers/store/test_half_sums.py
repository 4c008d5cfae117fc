"""Sums of half precision stay in float32 until the update has been made, or are rounded once where there is none."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from asking import Desk, floats, optimized, read, text_of
from asking_rows import pull_rows, push_rows, rows_in, with_tables
from hypothesis import given
from hypothesis import strategies as st
from pairs import Pair, copied, state

from kvstore import wire
from kvstore.codecs import Compressor, parse
from kvstore.codecs.options import travelling
from kvstore.table import Table
from kvstore.values import from_buffer, to_buffer

BIG = 40_000.0  # twice as much is more than float16 has
HALVES = [torch.float16, torch.bfloat16]


def halves(*numbers: float, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype)


def in_float32(push: wire.Push) -> wire.Push:
    return dataclasses.replace(push, in_float32=True)


def pushed(desk: Desk, values: list[torch.Tensor], clock: int = 1, **fields: object) -> None:
    for worker, value in zip(desk.workers, values, strict=True):
        desk.ask(worker, worker.push({1: value}, clock, **fields))


def test_an_update_is_made_with_a_sum_that_its_dtype_lacks():
    desk = optimized(Desk(2, values={1: halves(0, 0)}), "sgd", lr=1e-6)
    pushed(desk, [halves(BIG, 60_000), halves(BIG, 60_000)], rescale=0.5)
    assert desk.value(clock=1).tolist() == halves(-0.04, -0.06).tolist()


def test_a_sum_is_not_rounded_before_the_update():
    desk = optimized(Desk(3, values={1: halves(0, dtype=torch.bfloat16)}), "sgd", lr=1.0)
    pushed(desk, [halves(number, dtype=torch.bfloat16) for number in (256, 0.5, -256)])
    assert desk.value(clock=1).item() == -0.5


def test_each_push_that_is_an_update_is_made_with_the_sum_of_its_host():
    desk = Desk(2, "async", values={1: halves(0)}, aggregated=[(0, 1)], aggregate="host")
    for worker in desk.workers:
        desk.ask(worker, worker.set_optimizer("sgd", lr=1e-6))
    host = desk.aggregators[0]
    desk.ask(host, in_float32(host.push({1: floats(2 * BIG)}, rescale=0.5, ranks=[0, 1])))
    assert desk.value().item() == halves(-0.04).item()


def test_sums_of_hosts_come_as_float32():
    desk = optimized(Desk(4, values={1: halves(0)}, aggregated=[(0, 1), (2, 3)]), "sgd", lr=1e-6)
    for host, ranks, number in zip(desk.aggregators, ([0, 1], [2, 3]), (80_000, 80_001), strict=True):
        desk.ask(host, in_float32(host.push({1: floats(number)}, rescale=0.25, ranks=ranks)))
    assert desk.value(clock=1).item() == halves(-0.04).item()


@pytest.mark.parametrize("stored", [torch.float32, torch.float64, torch.int32])
def test_only_half_precision_has_sums_in_float32(stored: torch.dtype):
    desk = Desk(1, values={1: torch.zeros(1, dtype=stored)})
    message = desk.workers[0].push({1: floats(1)})
    assert "float32" in text_of(desk.reply(desk.workers[0], in_float32(message)), "WireError")


def test_a_payload_of_the_wrong_length_is_refused():
    desk = Desk(1, values={1: halves(0, 0)})
    for message in (desk.workers[0].push({1: floats(1, 2)}), in_float32(desk.workers[0].push({1: halves(1, 2)}))):
        text_of(desk.reply(desk.workers[0], message), "WireError")
    assert desk.value().tolist() == [0, 0]


def test_pushes_alike_but_for_their_dtype_are_told_apart():
    desk = optimized(Desk(2, values={1: halves(0)}, aggregated=[(0, 1)]), "sgd", lr=1.0)
    host, first = desk.aggregators[0], desk.workers[0]
    for clock in (1, 2, 3):  # from the second on by the shortcut
        desk.ask(host, in_float32(host.push({1: floats(1)}, clock, ranks=[0, 1])))
    for worker in desk.workers:
        desk.ask(worker, worker.push({1: halves(2)}, 4))
    assert read(desk, desk.reply(first, first.pull([1], 4))).item() == -7


def test_without_an_optimizer_the_sum_is_rounded_once_when_it_has_been_multiplied():
    desk = Desk(3, values={1: halves(0, 0)})
    pushed(desk, [halves(number, 1) for number in (2048, 1, 1)])
    assert desk.value(clock=1).tolist() == [2050, 3]
    pushed(desk, [halves(60_000, 1)] * 3, 2, rescale=1 / 3)
    assert desk.value(clock=2).tolist() == [60_000, 1]


def test_counts_are_not_multiplied():
    desk = Desk(2, values={1: torch.zeros(1, dtype=torch.int32)})
    pushed(desk, [torch.ones(1, dtype=torch.int32)] * 2, rescale=0.5)
    assert desk.value(clock=1).item() == 2


def test_workers_that_disagree_on_the_factor_get_an_error():
    desk, first, second = Desk(2, values={1: floats(5)}).and_workers()
    one = first.push({1: floats(1)}, rescale=0.5)
    desk.ask(first, one)
    replies = desk.ask(second, second.push({1: floats(1)}, rescale=0.25))
    assert "rescale_grad" in text_of(replies[0, one.seq], "Mismatch")
    assert desk.value(clock=1).item() == 5


def test_a_quorum_scales_the_sum_before_it_is_rounded():
    desk = Desk(3, values={1: halves(0)}, quorum=2)
    for worker in desk.workers[:2]:
        desk.ask(worker, worker.push({1: halves(20_000)}, rescale=1 / 3))
    assert desk.value(clock=1).item() == 20_000


def test_late_contributions_are_kept_in_float32():
    desk = optimized(Desk(3, values={1: halves(0)}, quorum=2, late="keep"), "sgd", lr=1e-6)
    for worker in desk.workers[:2]:
        desk.ask(worker, worker.push({1: halves(BIG)}, 1))
    desk.ask(desk.workers[2], desk.workers[2].push({1: halves(BIG)}, 1))
    before = desk.value(clock=1).item()
    assert before == pytest.approx(-0.12, rel=1e-3)
    for worker in desk.workers[:2]:
        desk.ask(worker, worker.push({1: halves(BIG)}, 2))
    assert desk.value(clock=2).item() == pytest.approx(-0.24, rel=1e-3)


@pytest.mark.parametrize("encoded", [False, True])
def test_a_new_standby_gets_late_sums_in_float32(encoded: bool):
    hosts = [(0, 1), (2, 3)]
    desk = Desk(4, values={1: halves(0, 0)}, aggregated=hosts, quorum=2, late="keep")
    optimized(desk, "sgd", lr=2.0**-20, momentum=0.5)
    for host, ranks in zip(desk.aggregators, hosts, strict=True):
        message = host.push({1: floats(80_001, 0.1)}, 1, ranks=ranks)
        if encoded:
            payload = to_buffer(Compressor(parse({"type": "int8"})).encode(1, floats(80_001, 0.1)).payload(0, 2))
            codec, lengths = travelling(parse({"type": "int8"})), [payload.nbytes]
            desk.ask(host, dataclasses.replace(message, codec=codec, lengths=lengths, buffers=[payload]))
        else:
            desk.ask(host, in_float32(message))
    values: list[torch.Tensor] = []
    standby = copied(desk.shard, 4, aggregated=hosts)
    assert state(standby) == state(desk.shard)
    for shard in (desk.shard, standby):
        desk.shard = shard
        host = desk.aggregators[0]
        desk.ask(host, in_float32(host.push({1: floats(80_000, 0)}, 2, ranks=[0, 1])))
        values.append(desk.value(clock=2))
    assert torch.equal(*values)
    assert 0 < -values[0][0].item() < 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_new_standby_gets_late_rows_in_float32(dtype: str):
    desk = with_tables(4, quorum=2, late="keep", tables={7: Table(shape=(9, 3), dtype=dtype)})
    optimized(desk, "sgd", lr=2.0**-20, momentum=0.5)
    for worker in desk.workers[:3]:
        desk.ask(worker, push_rows(worker, {7: {4: (80_001, 0.1, 1)}}, in_float32=True))
    rows: list[Any] = []
    standby = copied(desk.shard, 4)
    assert state(standby) == state(desk.shard)
    for shard in (desk.shard, standby):
        desk.shard = shard
        for worker in desk.workers[:2]:
            desk.ask(worker, push_rows(worker, {7: {4: (40_000, 0, 1)}}, 2, dtype=dtype))
        rows.append(rows_in(desk.reply(desk.workers[0], pull_rows(desk.workers[0], {7: [4]}, 2)), 3, dtype))
    assert rows[0] == rows[1]
    assert -1 < rows[0][0][0][0] < 0


def test_check_finite_looks_at_what_is_used():
    desk = optimized(Desk(2, values={1: halves(0)}, finite=True), "sgd", lr=1e-6)
    pushed(desk, [halves(BIG), halves(BIG)], rescale=0.5)
    assert desk.value(clock=1).item() == halves(-0.04).item()


def test_check_finite_refuses_a_sum_that_would_be_stored_as_infinite():
    desk, first, second = Desk(2, values={1: halves(5)}, finite=True).and_workers()
    one = first.push({1: halves(BIG)})
    desk.ask(first, one)
    replies = desk.ask(second, second.push({1: halves(BIG)}))
    assert "their sum is not in float16" in text_of(replies[0, one.seq], "NotFinite")
    assert desk.value(clock=1).item() == 5


def test_a_record_has_the_sum_in_float32_and_the_standby_its_bits():
    pair = Pair(2, values={1: halves(1)})
    optimized(pair, "sgd", lr=1e-6, momentum=0.9)
    for clock in (1, 2):
        pushed(pair, [halves(BIG), halves(BIG)], clock, rescale=0.5)
    records = [record for record in pair.records if isinstance(record, wire.ClosedRounds)]
    assert [from_buffer(record.buffers[0], "float32").tolist() for record in records] == [[BIG], [BIG]]
    pair.require_same()
    assert pair.value(clock=2).item() == halves(1 - 0.04 - 0.076).item()


@given(
    st.sampled_from(HALVES),
    st.lists(st.lists(st.floats(-60_000, 60_000, width=16), min_size=5, max_size=5), min_size=2, max_size=4),
    st.sampled_from([None, ("sgd", {"momentum": 0.5}), ("adam", {})]),
    st.sampled_from([None, 0.25]),
    st.booleans(),
)
def test_servers_standbys_and_copies_have_the_bits_of_a_float32_sum(dtype, numbers, rule, rescale, shares):
    pair = Pair(len(numbers), values={1: torch.zeros(5, dtype=dtype)}, shares=shares)
    if rule is not None:
        optimized(pair, rule[0], lr=1e-3, **rule[1])
    values = [torch.tensor(each, dtype=dtype) for each in numbers]
    plain = torch.zeros(5)
    for value in values:
        plain += value.float()
    plain *= 1 if rescale is None else rescale
    pushed(pair, values, rescale=rescale)
    if rule is None:
        assert torch.equal(pair.value(clock=1), plain.to(dtype))
    elif rule[0] == "sgd":
        assert torch.equal(pair.value(clock=1), torch.zeros(5).add(plain, alpha=-1e-3).to(dtype))
    pair.catch_up()
    assert state(pair.standby) == state(pair.shard) == state(copied(pair.shard, len(numbers)))
