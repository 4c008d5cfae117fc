"""Requests about tables, each to what does it."""

from __future__ import annotations

from typing import Any

import pytest
from asking import text_of
from asking_rows import evict, init_tables, put_rows, with_tables

from kvstore.table import Table


@pytest.mark.parametrize(
    "make",
    [lambda w: init_tables(w, {8: Table(dim=2)}), lambda w: put_rows(w, 7, {1: (1, 1)}), lambda w: evict(w, 7)],
)
def test_what_changes_a_whole_table_is_worker_zeros(make: Any):
    desk = with_tables(2)
    b = desk.workers[1]
    message = make(b)
    said = f"only worker 0 may send {type(message).__name__}, and worker 1 did"
    assert text_of(desk.reply(b, message), "UsageError") == said


def test_requests_about_tables_need_an_open_store():
    desk = with_tables(1)
    (a,) = desk.workers
    message = evict(a, 7)
    closed = type(message)(**{**vars(message), "store": 5})
    assert "store 5 is not open" in text_of(desk.reply(a, closed), "UsageError")
