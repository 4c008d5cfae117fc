"""The state of a table for a new standby: pages of the moment of the call, whatever comes while they are read."""

from __future__ import annotations

import gc

import pytest
from asking import Desk, sent
from asking_rows import init_tables, push_rows
from pairs import rows_of

from kvstore import wire
from kvstore.table import MinCount, Table
from servers.shard import Shard
from servers.store import snapshot


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
