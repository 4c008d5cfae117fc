"""The rule of a store: which reads may be answered, and which rules make sense."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.errors import UsageError
from kvstore.rule import MAX_STALENESS, Rule


def test_with_rounds_a_read_needs_as_many_pushes_of_all_as_its_worker_has_made() -> None:
    assert [Rule().needs(clock) for clock in (0, 1, 7)] == [0, 1, 7]


def test_without_rounds_a_read_needs_nobody() -> None:
    assert Rule("async").needs(1000) == 0


def test_with_a_bound_the_slowest_may_be_so_far_behind() -> None:
    assert [Rule("async", staleness=3).needs(clock) for clock in (0, 3, 4, 10)] == [0, 0, 1, 7]
    assert Rule("async", staleness=0).needs(4) == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "both"}, "mode='both' must be one of sync, async"),
        ({"late": "never"}, "late='never' must be one of drop, keep"),
        ({"staleness": 1}, "staleness is for"),
        ({"compensation": 0.1}, "delay_compensation for"),
        ({"mode": "async", "quorum": 2}, "a quorum is for"),
        ({"mode": "async", "staleness": -1}, "staleness=-1 must be from 0"),
        ({"mode": "async", "staleness": MAX_STALENESS + 1}, f"must be from 0 to {MAX_STALENESS}"),
        ({"quorum": 0}, "quorum=0 must be at least 1"),
        ({"mode": "async", "compensation": float("inf")}, "must be a finite number"),
        ({"aggregate": "all"}, "aggregate='all' must be one of rounds, host"),
        ({"aggregate": "host"}, "rounds are always summed by host"),
        ({"mode": "async", "aggregate": "host", "compensation": 0.1}, "corrects each worker's gradient by itself"),
    ],
)
def test_rules_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Rule(**options)


def test_a_quorum_is_at_most_all_workers() -> None:
    Rule(quorum=3).require_workers(3)
    Rule().require_workers(1)
    with pytest.raises(UsageError, match="quorum=3 is more than the 2 workers of this job"):
        Rule(quorum=3).require_workers(2)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (Rule(), "sync"),
        (Rule(quorum=2, late="keep"), "sync, quorum 2, late keep"),
        (Rule("async", staleness=0), "async, staleness 0"),
        (Rule("async", compensation=0.5, finite=True), "async, delay compensation 0.5, finite values only"),
    ],
)
def test_a_rule_in_words(rule: Rule, words: str) -> None:
    assert str(rule) == words
