"""What a primary records makes the same state at a standby, and what is repeated there after a takeover."""

from __future__ import annotations

import dataclasses

import handed_over
import numpy as np
import pytest
import torch
from asking import floats, optimized, read, sent, text_of
from asking_rows import init_tables, push_rows
from pairs import Pair, state

from kvstore import wire
from kvstore.optim.updater import Updater
from kvstore.table import MinCount, Table
from servers.replication.standby import Backlog

WIDTH = 1 << 12  # so large that a row is a frame of its own


def test_a_round_is_one_record_whose_rescaled_sum_both_steps_leave_alone():
    pair = Pair(2, values={1: floats(1, 2), 2: floats(3)})
    optimized(pair, "sgd", lr=0.5, momentum=0.9)
    before = len(pair.records)
    for clock in (1, 2):
        for worker in pair.workers:
            pair.ask(worker, worker.push({1: floats(1, 1), 2: floats(2)}, clock, rescale=0.5))
    first, second = [record for record in pair.records[before:] if isinstance(record, wire.ClosedRounds)]
    assert (first.versions, second.versions) == ([1], [2])
    for before_or_after in ("before", "after"):
        assert (first.rescale, *memoryview(first.buffers[0]).cast("f")) == (1, 1, 1, 2), (
            f"{before_or_after} the standby"
        )
        pair.catch_up()
    assert state(pair.standby) == state(pair.shard)


def test_a_sum_of_half_precision_is_rescaled_as_float32_before_it_is_recorded():
    pair = Pair(2, values={1: floats(1).half()})
    optimized(pair, "sgd", lr=0.5, momentum=0.9)
    for worker in pair.workers:
        pair.ask(worker, worker.push({1: floats(1).half()}, 1, rescale=0.3))
    (record,) = [record for record in pair.records if isinstance(record, wire.ClosedRounds)]
    assert (record.rescale, *memoryview(record.buffers[0]).cast("f")) == (1, float(floats(2).mul(0.3)))
    pair.require_same()


def test_a_repeat_of_what_counts_is_answered_and_of_an_open_round_counts():
    pair = Pair(2, values={1: floats(0)})
    optimized(pair, "sgd", lr=1.0)
    a, b = pair.workers
    one, two = a.push({1: floats(1)}, 1), b.push({1: floats(2)}, 1)
    pair.ask(a, one)
    pair.ask(b, two)
    three = a.push({1: floats(4)}, 2, want=True)
    pair.ask(a, three)
    pair.catch_up()
    pair.take_over()
    assert pair.ask(a, one) == {(0, one.seq): wire.Ack(one.seq)}
    assert pair.ask(a, three) == {}
    assert pair.ask(b, two) == {(1, two.seq): wire.Ack(two.seq)}
    replies = pair.ask(b, b.push({1: floats(8)}, 2))
    assert read(pair, replies[0, three.seq]) == -15


def test_a_round_that_has_failed_fails_for_those_who_ask_again():
    pair = Pair(2, values={1: floats(5)}, finite=True)
    a, b = pair.workers
    one = a.push({1: floats(float("nan"))}, 1)
    pair.ask(a, one)
    assert pair.ask(b, b.push({1: floats(1)}, 1)).keys() == {(0, one.seq), (1, b.seq)}
    pair.require_same()
    pair.take_over()
    assert "worker 0" in text_of(pair.reply(a, one), "NotFinite")
    assert pair.value() == 5


def test_buckets_are_split_and_merged_as_the_primarys_are():
    pair = Pair(1, values={1: floats(0), 2: floats(0), 3: floats(0)})
    (a,) = pair.workers
    pair.ask(a, a.push({1: floats(1), 2: floats(1)}, 1))
    pair.ask(a, a.push({3: floats(1)}, 1))
    pair.ask(a, a.push({1: floats(1), 2: floats(2), 3: floats(3)}, 2))
    assert [len(record.sizes) for record in pair.records if isinstance(record, wire.Grouped)] == [3, 1, 1]
    pair.require_same()


def test_what_an_optimizer_draws_at_random_is_recorded():
    pair = Pair(1, values={1: floats(0, 1)})
    optimized(pair, "sgld", lr=0.5)
    (a,) = pair.workers
    pair.ask(a, a.push({1: floats(1, 1)}, 1))
    pair.require_same()


def test_an_async_push_counts_once_wherever_it_is_repeated():
    pair = Pair(2, "async", values={1: floats(0)})
    optimized(pair, "sgd", lr=1.0)
    a, b = pair.workers
    lost = a.push({1: floats(1)}, 1, want=True)
    pair.ask(a, lost)
    pair.ask(b, b.push({1: floats(2)}, 1))
    pair.catch_up()
    pair.take_over()
    assert read(pair, pair.reply(a, lost)) == -3
    assert pair.value() == -3


@pytest.mark.parametrize("late", ["drop", "keep"])
def test_a_late_push_counts_once(late: str):
    pair = Pair(3, values={1: floats(0)}, quorum=1, late=late)
    a, b, _ = pair.workers
    pair.ask(a, a.push({1: floats(1)}, 1))
    slow = b.push({1: floats(2)}, 1)
    assert pair.reply(b, slow).missed == 1
    pair.require_same()
    pair.take_over()
    pair.ask(b, slow)
    pair.ask(a, a.push({1: floats(4)}, 2))
    assert torch.equal(pair.value(), floats(12 if late == "drop" else 9))


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_rows_of_tables_of_one_width_are_one_array_that_the_step_leaves_alone(name: str):
    pair = Pair(2)
    optimized(pair, name, lr=0.5, wd=0.5)
    first = pair.workers[0]
    tables = {1: Table(dim=WIDTH, init="normal", admit=MinCount(2)), 2: Table(shape=(9, WIDTH))}
    pair.ask(first, init_tables(first, tables))
    for clock in (1, 2, 3):
        for worker in pair.workers:
            gradients = {1: {clock % 2: [3] * WIDTH}, 2: {worker.rank: [1] * WIDTH, 5: [clock] * WIDTH}}
            pair.ask(worker, push_rows(worker, gradients, clock, rescale=0.5))
    records = [record for record in pair.records if isinstance(record, wire.ClosedRowRounds)]
    assert [(record.together, record.counts) for record in records] == [(True, [1, 3])] * 3
    ids, rows = (np.frombuffer(buffer, dtype) for buffer, dtype in zip(records[-1].buffers, ("i8", "f4"), strict=True))
    assert ids.tolist() == [1, 0, 1, 5]
    assert rows.reshape(4, -1)[:, 0].tolist() == [6, 1, 1, 6], "neither rescaled nor decayed"
    pair.require_same()


def test_rows_of_several_widths_are_not_taken_for_one_array():
    pair = Pair(2)
    first = pair.workers[0]
    pair.ask(first, init_tables(first, {1: Table(dim=4), 2: Table(dim=2)}))
    for worker in pair.workers:
        pair.ask(worker, push_rows(worker, {1: {1: (1, 1, 1, 1)}}))
    pair.catch_up()
    record = next(record for record in pair.records if isinstance(record, wire.ClosedRowRounds))
    broken = dataclasses.replace(record, ids=[1, 2], versions=[2, 1], counts=[1, 1], together=True)
    with pytest.raises(ValueError, match="several widths"):
        pair.standby.apply(broken)


@pytest.fixture
def soon():
    with handed_over.soon():
        yield


def rounds(pair, clocks, gradient=1.0):
    for clock in clocks:
        for worker in pair.workers:
            pair.ask(worker, worker.push({1: floats(gradient, clock), 2: floats(2)}, clock))


def made(pair, kind):
    return [record for record in pair.records if isinstance(record, kind)]


@pytest.mark.parametrize(("name", "options"), [("sgd", {"momentum": 0.9}), ("adam", {}), ("sgd", {})])
def test_a_standby_that_shares_memory_is_handed_what_updates_have_made(name, options, soon):
    pair = Pair(2, values={1: floats(1, 2), 2: floats(3)}, shares=True)
    optimized(pair, name, lr=0.5, **options)
    rounds(pair, (1, 2, 3))
    assert [record.kept for record in made(pair, wire.ClosedRounds)] == [True] * 3
    (handed,) = made(pair, wire.Updated)
    assert (handed.ids, handed.versions) == ([1, 2], [2])
    alone = [record for record in pair.records if not isinstance(record, wire.ClosedRounds)]
    third = made(pair, wire.ClosedRounds)[2]
    for record in (*alone, third):  # the first two rounds are in what was handed over
        pair.standby.apply(sent(record))
    assert state(pair.standby) == state(pair.shard)


def test_what_is_handed_over_does_not_change(soon):
    large = torch.ones(40_000)  # a frame of its own
    pair = Pair(1, values={1: large}, shares=True)
    optimized(pair, "sgd", lr=0.5, momentum=0.9)
    (worker,) = pair.workers
    for clock in (1, 2):
        pair.ask(worker, worker.push({1: large * clock}, clock))
    (handed,) = made(pair, wire.Updated)
    before = [bytes(buffer) for buffer in handed.buffers]
    assert len(before) == 2
    pair.ask(worker, worker.push({1: large}, 3))
    assert [bytes(buffer) for buffer in handed.buffers] == before


@pytest.mark.parametrize(("name", "options"), [("sgd", {"momentum": 0.9}), ("adam", {})])
def test_a_standby_goes_on_with_states_that_it_was_handed_instead_of_its_own(name, options, soon):
    pair = Pair(2, values={1: floats(1, 2), 2: floats(3)}, shares=True)
    optimized(pair, name, lr=0.5, **options)
    rounds(pair, (1, 2, 3))
    pair.require_same()
    before = len(pair.records)
    rounds(pair, (4, 5))
    fourth, handed, fifth = pair.records[before:]
    assert [type(record) for record in (fourth, handed, fifth)] == [wire.ClosedRounds, wire.Updated, wire.ClosedRounds]
    for record in (handed, fifth):
        pair.standby.apply(sent(record))
    assert state(pair.standby) == state(pair.shard)


def test_who_joins_goes_on_after_what_was_handed_over(soon):
    pair = Pair(2, values={1: floats(1, 2), 2: floats(3)}, shares=True)
    optimized(pair, "sgd", lr=0.5)
    for worker in pair.workers:
        pair.ask(worker, worker.pause({1: 2, 2: 2}))
    rounds(pair, (1, 2))
    for record in pair.records:
        if not isinstance(record, wire.ClosedRounds):
            pair.standby.apply(sent(record))
    pair.take_over()
    rounds(pair, (3,))
    (served,) = pair.shard.stores.values()
    assert [bucket.rounds.version for bucket in served.buckets.all()] == [3]


def test_a_round_that_has_failed_is_not_kept(soon):
    pair = Pair(2, finite=True, shares=True, values={1: floats(1, 2), 2: floats(3)})
    optimized(pair, "sgd", lr=0.5)
    a, b = pair.workers
    for clock, value in ((1, 1.0), (2, float("nan")), (3, 1.0)):
        pair.ask(a, a.push({1: floats(1, 2)}, clock))
        pair.ask(a, a.push({2: floats(value)}, clock))
        pair.ask(b, b.push({1: floats(1, 2), 2: floats(2)}, clock))
    first, second, third = made(pair, wire.ClosedRounds)
    assert (first.kept, len(first.buffers), first.failures) == (True, 2, [])
    assert (second.kept, len(second.buffers), len(second.failures)) == (False, 1, 1)
    assert third.kept


@pytest.mark.parametrize(
    ("options", "rule"),
    [({"shares": False}, {}), ({"shares": True}, {"quorum": 1}), ({"shares": True}, {"values": {}})],
)
def test_whoever_makes_updates_itself_is_handed_nothing(options, rule, soon):
    values = {1: floats(1, 2), 2: floats(3)}
    pair = Pair(1, **{"values": values, **options, **rule})
    if rule.get("values") == {}:  # sums are assigned
        pair.ask(pair.workers[0], pair.workers[0].init(values))
    else:
        optimized(pair, "sgd", lr=0.5)
    rounds(pair, (1, 2, 3))
    assert not any(record.kept for record in made(pair, wire.ClosedRounds))
    assert made(pair, wire.Updated) == []


def test_a_standby_knows_an_update_that_has_failed_although_it_keeps_rounds(soon, monkeypatch):
    pair = Pair(1, values={1: floats(1, 2), 2: floats(3)}, shares=True)
    optimized(pair, "sgd", lr=0.5)
    step = Updater.step

    def fail(self, groups, grads, keep=False):
        if float(grads[0][0]) == 7:
            raise ArithmeticError("seven")
        step(self, groups, grads, keep)

    monkeypatch.setattr(Updater, "step", fail)
    rounds(pair, (1,))
    rounds(pair, (2,), 7.0)
    rounds(pair, (3, 4))
    assert [record.kept for record in made(pair, wire.ClosedRounds)] == [True, True, False, True]
    backlog = Backlog()
    for record in pair.records:
        backlog.add(sent(record))
    backlog.hurry()
    while (due := backlog.take()) is not None:
        pair.standby.apply(due)
    assert state(pair.standby) == state(pair.shard)
    (served,) = pair.standby.stores.values()
    assert [list(bucket.failures) for bucket in served.buckets.all()] == [[2]]


def test_states_without_an_optimizer_are_refused():
    pair = Pair(1, values={1: floats(1)})
    pair.catch_up()
    with pytest.raises(ValueError, match="what an optimizer has made, and there is none"):
        pair.standby.apply(wire.Updated(0, [1], [1], [1], [], [], [], [], [], [bytes(4)]))


def test_values_that_are_older_are_refused():
    pair = Pair(1, values={1: floats(1)})
    optimized(pair, "sgd", lr=0.5)
    for clock in (1, 2):
        pair.ask(pair.workers[0], pair.workers[0].push({1: floats(4)}, clock))
    pair.catch_up()
    with pytest.raises(ValueError, match="round 1 was closed after round 2"):
        pair.standby.apply(wire.Updated(0, [1], [1], [1], [], [], [], [], [], [bytes(4)]))
