"""The records for a standby: numbers, what is sent when, and what is sent again."""

from __future__ import annotations

import pytest
from replication.pairs import change, number_of

from kvstore import wire
from kvstore.errors import WireError
from servers.replication import primary as primary_module
from servers.replication.primary import Journal


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
