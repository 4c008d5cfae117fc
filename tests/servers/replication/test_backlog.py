from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replication.pairs import closed, updated

from kvstore import wire
from servers.replication.standby import MOST, Backlog


def rows() -> wire.ClosedRowRounds:
    return wire.ClosedRowRounds(0, [9], [1], [], None, None, [], [], [0], False, [])


def taken(backlog: Backlog) -> list[wire.Message]:
    """All that is due."""
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
