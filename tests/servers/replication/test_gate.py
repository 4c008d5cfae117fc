"""The gate: what waits, for how long, and in which order it leaves."""

from __future__ import annotations

from kvstore import wire
from servers.replication.primary import Gate

A, B, C = ((link, wire.Ack(seq)) for seq, link in enumerate((b"a", b"b", b"c"), 1))


def test_an_answer_waits_for_the_records_before_it() -> None:
    gate = Gate()
    assert gate.take([A], 2, 1) == []
    assert gate.open(1) == []
    assert gate.open(2) == [A]
    assert gate.open(3) == []


def test_what_is_stored_already_passes_and_so_does_nothing() -> None:
    gate = Gate()
    assert gate.take([A], 2, 2) == [A]
    assert gate.take([], 5, 2) == []
    assert gate.held == 0


def test_answers_leave_in_the_order_in_which_they_were_made() -> None:
    gate = Gate()
    gate.take([A], 2, 1)
    gate.take([B], 3, 1)
    assert gate.take([C], 3, 3) == []
    assert gate.open(2) == [A]
    assert gate.open(3) == [B, C]
    assert gate.held == 3


def test_without_a_standby_all_leave() -> None:
    gate = Gate()
    gate.take([A], 2, 1)
    gate.take([B, C], 9, 1)
    assert gate.open() == [A, B, C]


def test_explanations_do_not_wait() -> None:
    gate = Gate()
    why = (b"a", wire.Explanation(4, "it waits"))
    assert gate.take([A, why, B], 2, 1) == [why]
    assert gate.open(2) == [A, B]


def test_what_waits_here_is_known_by_link_and_number() -> None:
    gate = Gate()
    gate.take([A, B], 2, 1)
    assert gate.holds(b"a", 1)
    assert not gate.holds(b"a", 2)
    assert not gate.holds(b"b", 1)
    gate.open(2)
    assert not gate.holds(b"a", 1)
