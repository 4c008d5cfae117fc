"""A primary: it records what changes, and answers when its standby has it."""

from __future__ import annotations

import pytest
from replication.pairs import Counting, change, number_of

from kvstore import wire
from kvstore.errors import WireError
from servers.replication import primary as primary_module
from servers.replication.primary import Gate, Journal, Primary


class Setup:
    def __init__(self) -> None:
        self.shard = Counting()
        self.primary = Primary(self.shard)
        self.shard.recorder = self.primary.record
        self.sent: list[tuple[int, int]] = []

    def send(self, record: wire.Record) -> None:
        self.sent.append((record.number, number_of(record)))

    def change(self, number: int) -> list[tuple[bytes, object]]:
        return self.primary.handle(b"link", change(number))  # type: ignore[return-value]

    def read(self, seq: int) -> list[tuple[bytes, object]]:
        return self.primary.handle(b"reader", wire.Pull(wire.Sender(wire.Node("worker", 1, 1), seq, 0), 0, [], []))  # type: ignore[return-value]


def paired(empty: bool = True) -> Setup:
    setup = Setup()
    if not empty:
        for number in (1, 2, 3):
            setup.change(number)
    assert setup.primary.pair(3, empty, setup.send) == []
    return setup


def test_alone_it_answers_at_once_and_records_nothing() -> None:
    setup = Setup()
    assert setup.change(7) == [(b"link", wire.Ack(7))]
    assert setup.primary.journal is None
    assert not setup.primary.synced


def test_an_answer_waits_until_its_record_is_stored_and_so_does_what_is_read_meanwhile() -> None:
    setup = paired()
    assert setup.primary.synced
    assert setup.read(1) == [(b"reader", wire.Ack(1))]
    assert setup.change(7) == setup.read(2) == []
    assert setup.sent == [(1, 7)]
    assert setup.primary.stored(wire.Stored(3, 1)) == [(b"link", wire.Ack(7)), (b"reader", wire.Ack(2))]
    assert setup.change(8) == []
    assert setup.change(9) == []
    assert setup.primary.stored(wire.Stored(3, 2)) == [(b"link", wire.Ack(8))]
    assert setup.primary.stored(wire.Stored(3, 3)) == [(b"link", wire.Ack(9))]


def test_the_record_leaves_before_the_change_is_made() -> None:
    setup = paired()
    seen: list[list[int]] = []
    setup.primary.pair(4, True, lambda _: seen.append(list(setup.shard.noted)))
    setup.change(7)
    assert (seen, setup.shard.noted) == ([[]], [7])


def test_what_waits_for_the_standby_is_explained() -> None:
    setup = paired()
    setup.change(7)
    ask = wire.Explain(wire.Sender(wire.Node("worker", 0, 1), 8, 0), 7)
    why = wire.Explanation(8, "waits for the standby of server 1, which has not stored it")
    assert setup.primary.handle(b"link", ask) == [(b"link", why)]
    setup.primary.stored(wire.Stored(3, 1))
    assert setup.primary.handle(b"link", ask) == [(b"link", wire.Explanation(8, ""))]


def test_without_its_standby_it_answers_what_waited() -> None:
    setup = paired()
    setup.change(7)
    assert setup.primary.part() == [(b"link", wire.Ack(7))]
    assert setup.change(8) == [(b"link", wire.Ack(8))]
    assert setup.primary.stored(wire.Stored(3, 1)) == []
    assert not setup.primary.synced


def test_a_newcomer_gets_all_and_gates_when_it_has_caught_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primary_module, "PIECE_BYTES", 1)
    setup = paired(empty=False)
    primary = setup.primary
    for seq in (10, 11, 12, 13):
        assert primary.capturing
        primary.go_on()
        assert setup.change(seq) == [(b"link", wire.Ack(seq))]  # nobody waits for the capture
        primary.stored(wire.Stored(3, min(len(setup.sent), 2)))
    assert setup.sent == [(1, 1), (2, 2), (3, 3), (4, 10), (5, 11), (6, 12), (7, 13)]
    primary.stored(wire.Stored(3, 3))
    assert setup.change(14) == []
    primary.stored(wire.Stored(3, 6))
    assert not primary.synced  # the answer to 13 has left
    primary.stored(wire.Stored(3, 7))
    assert primary.synced
    assert primary.stored(wire.Stored(3, 8)) == [(b"link", wire.Ack(14))]


def test_where_there_is_nothing_to_capture_it_gates_at_once() -> None:
    setup = Setup()
    setup.primary.pair(3, False, setup.send)
    assert not setup.primary.synced
    setup.primary.go_on()
    assert setup.primary.synced
    assert setup.change(7) == []


def test_a_standby_in_place_of_another_begins_anew() -> None:
    setup = paired()
    setup.change(7)
    assert setup.primary.pair(4, False, setup.send) == [(b"link", wire.Ack(7))]
    setup.primary.stored(wire.Stored(3, 1))
    assert not setup.primary.synced
    setup.primary.go_on()
    assert setup.sent == [(1, 7), (1, 7)]


def test_who_has_left_is_told_to_the_shard() -> None:
    setup = paired()
    assert setup.primary.depart([0]) == []
    assert setup.shard.departed == [0]


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
    assert gate.take([], 5, 2) == gate.open() == []


def test_answers_leave_in_the_order_in_which_they_were_made() -> None:
    gate = Gate()
    gate.take([A], 2, 1)
    gate.take([B], 3, 1)
    assert gate.take([C], 3, 3) == []
    assert gate.open(2) == [A]
    assert gate.open(3) == [B, C]


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


class Link(list[tuple[int, int]]):
    """What has been sent: (number of the record, number in it)."""

    def __call__(self, record: wire.Record) -> None:
        assert record.epoch == 3
        self.append((record.number, number_of(record)))


def journal(*numbers: int, capture: list[int] | None = None) -> tuple[Journal, Link]:
    link = Link()
    made = Journal(3, link, None if capture is None else iter([change(number) for number in capture]))
    for number in numbers:
        made.add(change(number))
    return made, link


def test_the_first_record_goes_alone_until_it_is_stored_and_all_others_at_once() -> None:
    records, link = journal(10, 20, 30)
    assert link == [(1, 10)]
    records.store(wire.Stored(3, 1))
    assert link == [(1, 10), (2, 20), (3, 30)]
    records.add(change(40))
    assert link[-1] == (4, 40)
    assert (records.newest, records.stored) == (4, 1)


def test_over_a_new_link_goes_again_what_is_not_stored() -> None:
    records, link = journal(10, 20, 30)
    records.send_again()
    assert link == [(1, 10), (1, 10)]
    records.store(wire.Stored(3, 1))
    records.store(wire.Stored(3, 2))
    link.clear()
    records.send_again()
    assert link == [(3, 30)]
    records.store(wire.Stored(3, 3))
    records.send_again()
    assert link == [(3, 30)]


def test_stored_never_goes_back() -> None:
    records, _ = journal(10, 20)
    records.store(wire.Stored(3, 2))
    records.store(wire.Stored(3, 1))
    assert records.stored == 2


def test_what_another_view_has_stored_says_nothing() -> None:
    records, link = journal(10, 20)
    records.store(wire.Stored(2, 1))
    records.store(wire.Stored(4, 9))
    assert (records.stored, link) == (0, [(1, 10)])


def test_nobody_has_what_was_never_made() -> None:
    records, _ = journal(10, 20)
    with pytest.raises(WireError, match="expected records up to 2, got Stored of 3"):
        records.store(wire.Stored(3, 3))


def test_a_capture_comes_in_pieces_and_later_changes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primary_module, "PIECE_BYTES", 1)
    records, link = journal(50, capture=[10, 20])
    assert (records.capturing, link) == (True, [])
    records.go_on()
    assert link == [(1, 10)]
    records.store(wire.Stored(3, 1))
    records.add(change(60))
    records.go_on()
    assert records.capturing
    records.go_on()
    assert not records.capturing
    records.add(change(70))
    records.go_on()
    assert link == [(1, 10), (2, 20), (3, 50), (4, 60), (5, 70)]


def test_a_small_capture_is_one_piece() -> None:
    records, link = journal(50, capture=[10, 20])
    records.go_on()
    records.store(wire.Stored(3, 1))
    assert link == [(1, 10), (2, 20), (3, 50)]
