"""The messages about how a job is: what is refused beside what each field's own check refuses."""

from __future__ import annotations

import pytest
from any_message import with_shorter

from kvstore import wire
from kvstore.errors import WireError
from kvstore.wire.guests import ALIGN, NOT_HELD, READS, aligned

SERVER = wire.Node("server", 0, 1)
REPORT = wire.ServerReport(SERVER, 1.5, 7, 1, 2, 3, 4, 5, 6, 3, [1, 2], [10, 20], [0], [1], 30, "waits")


def test_a_report_comes_back_as_it_was() -> None:
    assert wire.decode(wire.encode(REPORT)) == REPORT


def test_a_report_has_both_counts_for_each_worker() -> None:
    with pytest.raises(WireError, match="lists of one length"):
        wire.decode(with_shorter(REPORT, "alone_us"))


def test_an_answer_has_a_place_for_each_member() -> None:
    with pytest.raises(WireError, match="lists of one length"):
        wire.decode(with_shorter(wire.Located(1, [0, 1], ["is at a.py:1 in f", "has left"]), "places"))


@pytest.mark.parametrize(
    "record",
    [
        ["reader", 0, 1, "ready", 0.0, "", "node7", 42],
        ["worker", 0, 1, "asleep", 0.0, "", "node7", 42],
        ["worker", 0, 1, "ready", float("nan"), "", "node7", 42],
        ["worker", 0, 1, "ready", 0.0, "", "n" * 256, 42],
        ["worker", 0, 1, "ready", 0.0, "", "node7", -1],
        ["worker", 0, 1, "ready", 0.0, "", "node7", "42"],
        ["worker", 0, 1, "ready", 0.0, ""],
    ],
)
def test_a_record_of_a_member_is_checked(record: list[object]) -> None:
    with pytest.raises(WireError, match=r"Observed\.members"):
        wire.decode(wire.encode(wire.Observed(1, 0.0, 0.0, [1, 1, 0, 0], [record], None, "", 0, [], [])))


ME = wire.Sender(wire.Node("reader", 3, 7), 1, 1)


def test_values_lie_at_whole_steps() -> None:
    assert [aligned(nbytes) for nbytes in (0, 1, ALIGN, ALIGN + 1)] == [0, ALIGN, ALIGN, 2 * ALIGN]


def test_a_reader_may_hold_nothing_of_a_segment() -> None:
    read = wire.ReadValues(ME, 0, [4, 9], 7, [NOT_HELD, 12], 3)
    assert wire.decode(wire.encode(read)) == read
    with pytest.raises(WireError, match="one length"):
        wire.ReadValues(ME, 0, [4, 9], 7, [12], 3)


def test_what_is_found_adds_up() -> None:
    with pytest.raises(WireError, match="expected 2 segments"):
        wire.KeysFound(1, 0, [0], [[3]], ["float32"], [None], [2], [5], [0], [0], [3])


def test_the_requests_of_readers_are_these() -> None:
    assert set(READS) == {wire.Connect, wire.FindKeys, wire.ListKeys, wire.ReadValues, wire.ReadRows}
