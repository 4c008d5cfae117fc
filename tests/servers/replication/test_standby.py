"""A standby: whose records it takes, in which order, and when they are applied."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from asking import Door
from hypothesis import given
from hypothesis import strategies as st
from replication.pairs import SERVER, STANDBY, Counting, arrived, change, closed, updated

from kvstore import wire
from kvstore.errors import WireError
from servers.replication.standby import KEPT, MOST, Backlog, Standby

VIEW = wire.View(SERVER, 2, "its key", ["standby", 1], "inproc://standby", "my key", False)


class Setup:
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


def ready() -> Setup:
    setup = Setup()
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
    setup = Setup(link="its key", impostor="another key", zombie="its key")
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
    setup = Setup(None, link="its key", other="another key")
    setup.standby.here(b"link", SERVER)
    assert setup.take(1) == []
    setup.standby.here(b"other", STANDBY)
    assert setup.standby.look(VIEW) == [(b"link", wire.Stored(2, 1))]
    assert (setup.door.admitted, setup.door.refused) == ([b"link"], [b"other"])
    setup.standby.catch_up()
    assert setup.shard.noted == [10]


def test_what_is_not_the_primarys_is_dropped_when_the_view_is_there() -> None:
    setup = Setup(None, link="another key")
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
    setup = Setup(None)
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
