"""The counters of a store: each change is a new record, and the one before stays as it is."""

from __future__ import annotations

from kvstore import wire
from kvstore.client.pushes import Counts


def test_calls_count_their_keys() -> None:
    counts = Counts().called(3, 0).called(2, 2).called(0, 5)
    assert (counts.pushes, counts.pulls) == (5, 7)


def test_late_segments_count_only_where_rounds_may_be_over_before() -> None:
    answer = wire.Ack(1, missed=4)
    assert Counts().sent(100, answer, quorum=True) == Counts(bytes_pushed=100, late=4)
    assert Counts().sent(100, answer, quorum=False) == Counts(bytes_pushed=100)
    assert Counts(late=1).sent(0, wire.Values(1, missed=2), quorum=True).late == 3


def test_reads_count_their_bytes_and_how_far_ahead_they_were() -> None:
    counts = Counts().received(10, 0).received(20, 2).received(30, 0)
    assert counts.bytes_pulled == 60
    assert dict(counts.staleness) == {0: 2, 2: 1}
    assert Counts().received(5, None) == Counts(bytes_pulled=5), "rounds have no staleness"


def test_a_change_leaves_what_there_was() -> None:
    before = Counts().received(10, 1)
    after = before.received(10, 1).called(1, 1)
    assert dict(before.staleness) == {1: 1}
    assert dict(after.staleness) == {1: 2}
    assert before.pulls == 0
