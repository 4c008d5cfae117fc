"""Rate-limited logging: the first, the tenth, the hundredth."""

from __future__ import annotations

import logging

import pytest

from kvstore.rare_log import Drops, worth_a_line


def test_lines_become_rarer_by_tens() -> None:
    assert [count for count in range(2000) if worth_a_line(count)] == [1, 10, 100, 1000]


def test_drops_are_counted_and_now_and_then_logged(caplog: pytest.LogCaptureFixture) -> None:
    drops = Drops(logging.getLogger("somewhere"))
    for number in range(1, 151):
        drops.note("a message", f"reason {number}")
    assert [record.getMessage() for record in caplog.records] == [
        "dropped a message (1 so far): reason 1",
        "dropped a message (10 so far): reason 10",
        "dropped a message (100 so far): reason 100",
    ]
    assert {record.name for record in caplog.records} == {"somewhere"}


def test_each_counts_for_itself(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        Drops(logging.getLogger("somewhere")).note("a message", "no reason")
    assert len(caplog.records) == 2
