"""The whole state of a server, told to another."""

from __future__ import annotations

import gc

import pytest
from asking import Desk, floats, optimized, read, sent
from asking_rows import init_tables, push_rows
from pairs import Pair, copied, rows_of, state

from kvstore import wire
from kvstore.errors import WireError
from kvstore.table import MinCount, Table
from servers.shard import Shard
from servers.store import snapshot


def test_a_copy_has_values_states_and_pauses_and_goes_on_alike():
    pair = Pair(2, values={1: floats(1, 2), 2: floats(3)})
    optimized(pair, "adam", lr=0.5)
    for worker in pair.workers:
        pair.ask(worker, worker.push({1: floats(1, 1), 2: floats(2)}, 1))
    pair.ask(pair.workers[1], pair.workers[1].pause({1: 1, 2: 1}))
    pair.standby = copied(pair.shard, 2)
    pair.records.clear()
    assert state(pair.standby) == state(pair.shard)
    pair.ask(pair.workers[0], pair.workers[0].push({2: floats(1)}, 2))
    pair.catch_up()
    assert state(pair.standby) == state(pair.shard)


def test_a_capture_stays_as_it_was_when_it_was_made():
    pair = Pair(1, values={1: floats(1, 2)})
    optimized(pair, "sgd", lr=0.5, momentum=0.5)
    (a,) = pair.workers
    pair.ask(a, a.push({1: floats(1, 1)}, 1))
    before, capture = state(pair.shard), pair.shard.capture()
    pair.ask(a, a.push({1: floats(1, 1)}, 2))
    pair.standby = Shard(0, 1)
    for message in capture:
        pair.standby.apply(message)
    assert state(pair.standby) == before != state(pair.shard)


@pytest.mark.parametrize("kind", [wire.BucketState, wire.StatesState, wire.EncoderState])
def test_what_does_not_fit_is_refused(kind: type):
    pair = Pair(1, values={1: floats(1, 2)})
    (a,) = pair.workers
    if kind is wire.StatesState:
        optimized(pair, "sgd", lr=0.5, momentum=0.5)
    pair.ask(a, a.push({1: floats(1, 1)}, 1))
    if kind is wire.EncoderState:
        pair.ask(a, a.pull([1], 1, back=["2bit", [["threshold", 0.5]]]))
    made = Shard(0, 1)
    for message in pair.shard.capture():
        received = sent(message)
        if isinstance(received, kind):
            received.buffers[0] = received.buffers[0][:-1]
            with pytest.raises(WireError):
                made.apply(received)
            return
        made.apply(received)
    pytest.fail("there was none")


def test_a_push_that_waits_at_one_standby_after_another_counts_once():
    pair = Pair(2, "async", values={1: floats(0)}, staleness=0)
    a, b = pair.workers
    for worker in (a, b):
        pair.ask(worker, worker.set_optimizer("sgd", lr=1.0))
    ahead = a.push({1: floats(1)}, 1, want=True)
    for _ in range(3):
        assert pair.ask(a, ahead) == {}
        pair.shard = copied(pair.shard, 2)
    pair.ask(a, ahead)
    assert read(pair, pair.ask(b, b.push({1: floats(2)}, 1))[0, ahead.seq]) == -3


def pushed(table: Table, rows: int) -> Desk:
    desk = Desk(1)
    worker = desk.workers[0]
    desk.ask(worker, init_tables(worker, {1: table}))
    desk.ask(worker, push_rows(worker, {1: {number: [float(number)] for number in range(rows)}}, 1))
    return desk


def test_pages_are_of_the_moment_though_pushes_come_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = pushed(Table(dim=1, dtype="float32"), 5)
    shard, worker = desk.shard, desk.workers[0]
    wanted = rows_of(shard.stores[0].buckets.table(1).table)
    monkeypatch.setattr(snapshot, "PAGE_BYTES", 1)
    captured: list[wire.Message] = []
    for clock, message in enumerate(shard.capture(), 2):
        captured.append(sent(message))
        desk.ask(worker, push_rows(worker, {1: {0: [9.0], 4: [9.0], 10 * clock: [1.0]}}, clock))
    assert sum(isinstance(message, wire.TablePage) for message in captured) == 5
    standby = Shard(0, 1)
    for message in captured:
        standby.apply(message)
    assert rows_of(standby.stores[0].buckets.table(1).table) == wanted


def test_a_snapshot_that_nobody_reads_is_forgotten() -> None:
    desk = pushed(Table(dim=1, admit=MinCount(1)), 3)
    table = desk.shard.stores[0].buckets.table(1).table
    captured = desk.shard.capture()
    size = table.statistics()["bytes"]
    del captured
    gc.collect()
    assert table.statistics()["bytes"] < size
