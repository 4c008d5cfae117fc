"""A primary and its standby: what is recorded, when it is answered, and in which order it is applied."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from asking import Door
from hypothesis import given
from hypothesis import strategies as st
from replication.pairs import SERVER, STANDBY, Counting, arrived, change, closed, number_of, updated

from kvstore import wire
from kvstore.errors import WireError
from servers.replication import primary as primary_module
from servers.replication.primary import Gate, Journal, Primary
from servers.replication.standby import KEPT, MOST, Backlog, Standby

# ---- a primary: it records what changes, and answers when its standby has it


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
    assert setup.primary.depart(wire.Roster(1, [0])) == []
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


# ---- a standby: whose records it takes, in which order, and when they are applied


VIEW = wire.View(SERVER, 2, "its key", ["standby", 1], "inproc://standby", "my key", False)


class Follower:
    def __init__(self, view: wire.View | None = VIEW, **keys: str) -> None:
        self.door = Door({link.encode(): key for link, key in (keys or {"link": "its key"}).items()})
        self.shard = Counting()
        self.standby = Standby(self.shard.apply, self.door)
        if view is not None:
            assert self.standby.look(view) == []

    def note(self, number: int, message: wire.Message) -> Any:
        return self.standby.take(b"link", arrived(wire.Record(2, number, wire.encode(message))))

    def take(self, number: int, epoch: int = 2, peer: bytes = b"link") -> Any:
        return self.standby.take(peer, arrived(wire.Record(epoch, number, wire.encode(change(10 * number)))))


def ready() -> Follower:
    setup = Follower()
    setup.standby.here(b"link", SERVER)
    return setup


def test_a_record_is_stored_when_it_comes_and_applied_later_in_order() -> None:
    setup = ready()
    assert setup.take(1) == [(b"link", wire.Stored(2, 1))]
    assert setup.take(2) == [(b"link", wire.Stored(2, 2))]
    assert (setup.shard.noted, setup.standby.behind) == ([], 2)
    setup.standby.go_on()
    assert (setup.shard.noted, setup.standby.behind) == ([10], 1)
    setup.take(3)
    setup.standby.catch_up()
    setup.standby.go_on()
    assert (setup.shard.noted, setup.standby.behind) == ([10, 20, 30], 0)


def test_a_round_that_is_kept_is_stored_and_applied_only_if_this_process_takes_over() -> None:
    setup = ready()
    for number, message in enumerate([closed(1), closed(2), updated(2), closed(3)], 1):
        assert setup.note(number, message) == [(b"link", wire.Stored(2, number))]
        setup.standby.go_on()
    assert (setup.shard.noted, setup.standby.behind, setup.standby.ready) == ([], 2, False)
    setup.standby.catch_up()
    assert (setup.shard.noted, setup.standby.behind) == ([2, 3], 0)
    setup.note(5, closed(4))
    setup.take(6)
    assert setup.standby.ready
    setup.standby.go_on()
    setup.standby.go_on()
    assert (setup.shard.noted, setup.standby.ready) == ([2, 3, 4, 60], False)


def test_a_repeat_is_said_to_be_stored_and_not_applied_again() -> None:
    setup = ready()
    setup.take(1)
    setup.take(2)
    assert setup.take(1) == [(b"link", wire.Stored(2, 2))]
    setup.standby.catch_up()
    assert setup.shard.noted == [10, 20]


def test_a_gap_is_refused() -> None:
    setup = ready()
    setup.take(1)
    with pytest.raises(WireError, match="expected record 2, got 3"):
        setup.take(3)
    assert setup.take(2) == [(b"link", wire.Stored(2, 2))]


@pytest.mark.parametrize("epoch", [1, 3])
def test_a_record_of_another_view_is_refused(epoch: int) -> None:
    setup = ready()
    with pytest.raises(WireError, match=f"a record of view {epoch} from server 1; this standby takes those of view 2"):
        setup.take(1, epoch)
    setup.standby.catch_up()
    assert setup.shard.noted == []


def test_only_the_primary_is_heard_over_a_link_with_its_key() -> None:
    setup = Follower(link="its key", impostor="another key", zombie="its key")
    setup.standby.here(b"impostor", SERVER)
    setup.standby.here(b"zombie", wire.Node("server", 1, 2))
    for peer, who in ((b"impostor", "server 1"), (b"zombie", "server 1"), (b"link", "a stranger")):
        with pytest.raises(WireError, match=f"from {who}"):
            setup.take(1, peer=peer)
    assert setup.door.refused == [b"impostor", b"zombie"]
    setup.standby.here(b"link", SERVER)
    assert setup.take(1)
    assert setup.door.admitted == [b"link"]


def test_records_that_come_before_the_view_are_judged_when_it_is_there() -> None:
    setup = Follower(None, link="its key", other="another key")
    setup.standby.here(b"link", SERVER)
    assert setup.take(1) == []
    setup.standby.here(b"other", STANDBY)
    assert setup.standby.look(VIEW) == [(b"link", wire.Stored(2, 1))]
    assert (setup.door.admitted, setup.door.refused) == ([b"link"], [b"other"])
    setup.standby.catch_up()
    assert setup.shard.noted == [10]


def test_what_is_not_the_primarys_is_dropped_when_the_view_is_there() -> None:
    setup = Follower(None, link="another key")
    setup.standby.here(b"link", SERVER)
    assert setup.take(1) == []
    assert setup.standby.look(VIEW) == []
    assert setup.door.refused[0] == b"link"
    assert setup.standby.behind == 0


def test_records_keep_the_epoch_of_the_first_view() -> None:
    setup = ready()
    setup.take(1)
    assert setup.standby.look(wire.View(SERVER, 3, "its key", ["standby", 1], "", "", True)) == []
    assert setup.take(2) == [(b"link", wire.Stored(2, 2))]


def test_strangers_cost_a_bounded_amount() -> None:
    setup = Follower(None)
    for number in range(100):
        setup.standby.here(b"%d" % number, SERVER)
        setup.take(1, peer=b"%d" % number)
    assert len(setup.standby.look(VIEW)) == 0
    assert len(setup.door.refused) <= 2 * KEPT


def rows() -> wire.ClosedRowRounds:
    return wire.ClosedRowRounds(0, [9], [1], [], None, None, [], [], [0], False, [])


def taken(backlog: Backlog) -> list[wire.Message]:
    found = []
    while (message := backlog.take()) is not None:
        found.append(message)
    assert not backlog.ready
    return found


def test_kept_rounds_are_replaced_by_what_was_made_of_them_and_that_by_the_next() -> None:
    backlog = Backlog()
    for version in (1, 2, 3):
        backlog.add(closed(version))
    assert (backlog.ready, len(backlog)) == (False, 3)
    backlog.add(updated(3))
    assert (backlog.ready, len(backlog)) == (False, 1)
    backlog.add(closed(4))
    backlog.add(updated(4))
    backlog.add(closed(5))
    assert (backlog.ready, len(backlog)) == (False, 2)
    backlog.hurry()
    assert taken(backlog) == [updated(4), closed(5)]
    backlog.hurry()
    assert taken(backlog) == []


@pytest.mark.parametrize(
    "later",
    [closed(4, kept=False), closed(1, (2,), kept=False), wire.ReadBy(0, [1], [0]), updated(2), updated(3, (1, 2))],
    ids=["to be made", "others to be made", "no round", "of another round", "of other arrays"],
)
def test_other_records_come_after_all_before_them(later: wire.Message) -> None:
    backlog = Backlog()
    before = [closed(1, (5,)), closed(2), closed(3)]
    for message in (*before, later):
        backlog.add(message)
    assert taken(backlog) == [*before, later]
    assert len(backlog) == 0


def test_rounds_of_tables_and_of_other_arrays_hurry_nobody() -> None:
    backlog = Backlog()
    for message in (closed(1), closed(1, (2,)), closed(1, store=1), rows()):
        backlog.add(message)
    assert taken(backlog) == [rows()]
    backlog.add(updated(1, (2,)))
    backlog.hurry()
    assert taken(backlog) == [closed(1), updated(1, (2,)), closed(1, store=1)]


def test_arrays_that_are_pushed_in_another_list_are_kept_anew() -> None:
    backlog = Backlog()
    for message in (closed(1), closed(1, (2,)), closed(2, (1, 2))):
        backlog.add(message)
    assert taken(backlog) == [closed(1), closed(1, (2,))]
    backlog.add(updated(2, (1, 2)))
    assert (backlog.ready, len(backlog)) == (False, 1)


def test_only_so_many_rounds_are_kept() -> None:
    backlog = Backlog()
    for version in range(1, MOST + 2):
        assert not backlog.ready
        backlog.add(closed(version))
    assert len(taken(backlog)) == MOST + 1


KINDS = st.one_of(
    st.tuples(st.just("round"), st.integers(0, 4), st.booleans()),
    st.tuples(st.just("made"), st.integers(0, 4), st.booleans()),
    st.tuples(st.just("other"), st.just(0), st.just(False)),
)


@given(st.lists(st.tuples(KINDS, st.integers(0, 3)), max_size=40))
def test_what_is_taken_leads_to_the_same_state(kinds: list[tuple[tuple[str, int, bool], int]]) -> None:
    """By array: the number of its rounds. A round makes it one more, and what has been made of it says how many."""
    backlog = Backlog()
    lists = [(1,), (2,), (3, 4), (3,), (4, 5)]
    primary, standby = dict.fromkeys(range(1, 6), 0), dict.fromkeys(range(1, 6), 0)

    def apply(message: wire.Message) -> None:
        if isinstance(message, wire.ReadBy):  # which reads everything
            assert standby == dict(zip(message.ids, message.ranks, strict=True))
            return
        assert isinstance(message, wire.ClosedRounds | wire.Updated)
        for number, version in zip(message.ids, message.versions, strict=True):
            if isinstance(message, wire.ClosedRounds):
                assert version == standby[number] + 1
            assert version >= standby[number]
            standby[number] = version

    for (kind, place, kept), takes in kinds:
        ids = lists[place]
        message: wire.Message = wire.ReadBy(0, list(primary), list(primary.values()))
        if kind == "round":
            primary |= {number: primary[number] + 1 for number in ids}
            message = replace(closed(0, ids, kept=kept), versions=[primary[number] for number in ids])
        elif kind == "made":
            message = replace(updated(0, ids), versions=[primary[number] for number in ids])
        backlog.add(message)
        for _ in range(takes):
            if (due := backlog.take()) is not None:
                apply(due)
    backlog.hurry()
    for due in taken(backlog):
        apply(due)
    assert standby == primary
