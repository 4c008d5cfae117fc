"""A table that is captured: pages of its round, whatever comes while they are read."""

from __future__ import annotations

import numpy as np
import pytest
from asking import Desk
from asking_rows import init_tables, push_rows

from kvstore.checkpoint.tables import IDS, VALUES, page_name
from kvstore.table import Table
from servers.store import capture as captures
from servers.store.capture import TableCapture


def test_pages_are_of_the_round_though_updates_come_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "PAGE_BYTES", 100)
    desk = Desk(1)
    worker = desk.workers[0]
    desk.ask(worker, init_tables(worker, {1: Table(dim=1)}))
    desk.ask(worker, push_rows(worker, {1: {number: [float(number)] for number in range(20)}}, 1))
    target = desk.shard.stores[0].buckets.table(1)
    capture = TableCapture(target)
    headers, parts = [], []
    desk.ask(worker, push_rows(worker, {1: {3: [7.0], 30: [7.0]}}, 2))
    headers = list(capture.headers())
    for clock, part in enumerate(capture.contents(), 3):
        parts.append(bytes(part))
        desk.ask(worker, push_rows(worker, {1: {19: [9.0], 50 + clock: [1.0]}}, clock))
    assert [len(part) for part in parts] == [header.nbytes for header in headers]
    by_name = {header.name: part for header, part in zip(headers, parts, strict=True)}
    pages = range(sum(name.endswith(f"/{IDS}") for name in by_name))
    assert len(pages) > 1
    ids = b"".join(by_name[page_name(1, page, IDS)] for page in pages)
    rows = b"".join(by_name[page_name(1, page, VALUES)] for page in pages)
    assert sorted(np.frombuffer(ids, np.int64)) == list(range(20))
    assert np.array_equal(np.frombuffer(rows, np.float32), np.frombuffer(ids, np.int64))
    before = target.table.statistics()["bytes"]
    capture.drop()
    assert target.table.statistics()["bytes"] < before
