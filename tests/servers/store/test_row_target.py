"""Tables in a group: what they share, and what each has when the group is split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from asking import optimized, sender
from asking_rows import (
    push_rows,
    rows_in,
    with_tables,
)

from kvstore import wire
from kvstore.optim.optimizer import describe
from kvstore.optim.updater import RowUpdater
from kvstore.rows.sums import RowBatch
from kvstore.table import Table, Unseen
from servers.store.hyperparameters import UpdateHyperparameters
from servers.store.rounds import Rounds
from servers.store.row_target import (
    KEPT,
    GroupContribution,
    RowContribution,
    RowTarget,
    TableGroup,
    TableGroups,
    alike,
    at_one_point,
)
from servers.store.target import ParkedRequest

FIXED = Table(shape=(9, 4))
SGD = describe("sgd", {})


def a_target(number: int, table: Table = FIXED, stripe: int = 0, version: int = 3) -> RowTarget:
    target = RowTarget(number, f"t{number}", table, stripe, 2, Rounds([0, 1], version))
    target.use(RowUpdater(SGD, target.key, "float32", table.width, table.grows))
    return target


def contributed(group: TableGroup, rank: int, clock: int, ids: list[int], starts: list[int]) -> None:
    rows = np.arange(len(ids) * 4, dtype=np.float32).reshape(-1, 4)
    item = GroupContribution([rank], clock, RowBatch(np.array(ids), rows, starts), UpdateHyperparameters(0.5), None)
    assert group.rounds.contribute([rank], clock, item)


def a_push(ids: list[int]) -> wire.PushRows:
    zeros = [0] * len(ids)
    return wire.PushRows(
        sender(), 0, ids, zeros, zeros, zeros, False, False, False, None, None, [], ["none"] * len(ids)
    )


def test_each_table_has_its_part_of_open_rounds_when_the_group_is_split() -> None:
    groups, targets = TableGroups(), [a_target(7), a_target(8)]
    group = groups.make(targets)
    assert groups.find([7, 8]) is group
    assert groups.find([8, 7]) is None
    contributed(group, 1, 4, [2, 4, 6], [0, 1, 3])
    group.judged, group.last_at = 3, 12.5
    assert groups.split(targets[1]) is targets[1]
    assert groups.find([7, 8]) is None
    found: Any = [(target.rounds.version, target.rounds.open(), target.group, target.last_at) for target in targets]
    assert [(version, own, at) for version, _, own, at in found] == [(3, None, 12.5)] * 2
    items = [item for _, ((clock, ranks, item),), *_ in found if (clock, ranks) == (4, [1])]
    assert [item.ids.tolist() for item in items] == [[2], [4, 6]]
    assert [item.rows[:, 0].tolist() for item in items] == [[0], [4, 8]]
    assert [item.batch[1] for item in items] == [0, 1]
    assert items[0].batch[0] is items[1].batch[0]
    assert items[0].who == "worker 1"


def test_requests_wait_for_just_those_tables_that_they_name() -> None:
    targets = [a_target(7), a_target(8), a_target(9)]
    group = TableGroup(targets)
    push = ParkedRequest(b"", a_push([7, 8, 9]), left=1)
    pull = ParkedRequest(b"", wire.PullRows(sender(), 0, [8, 3], [4, 1], [0, 0], False, ["none"] * 2), left=2)
    group.parked += [(4, push), (4, pull)]
    group.split()
    assert [[parked for _, parked in target.parked] for target in targets] == [[push], [push, pull], [push]]
    assert (push.left, pull.left) == (3, 2)
    assert not group.parked


def test_what_the_last_rounds_have_changed_is_known_of_each_table() -> None:
    targets = [a_target(7), a_target(8)]
    targets[0].note_changed(np.array([2]))
    group = TableGroup(targets)
    for version in range(4, 9):
        group.rounds.version = version
        group.note_changed([(np.array([0, version, 2]), [0, 2, 3]), (np.array([6]), [0, 0, 1])])
    group.split()
    assert {version: ids.tolist() for version, ids in targets[0].changed.items()} == {v: [0, v] for v in range(5, 9)}
    assert targets[1].changed_in(8).tolist() == [2, 6]


@pytest.mark.parametrize(
    "other",
    [
        a_target(8, Table(shape=(9, 8))),
        a_target(8, Table(shape=(9, 4), dtype="float64")),
        a_target(8, Table(shape=(9, 4), codec="fp16")),
        a_target(8, Table(dim=4)),
        a_target(8, Table(dim=4, evict=Unseen(3))),
        a_target(8, stripe=1),
    ],
)
def test_tables_of_another_kind_are_not_alike(other: RowTarget) -> None:
    assert alike([a_target(7), a_target(8, Table(shape=(5, 4)))])
    assert not alike([a_target(7), other])


def test_tables_at_different_points_are_no_group() -> None:
    assert at_one_point([a_target(7), a_target(8)])
    assert not at_one_point([a_target(7), a_target(8, version=4)])
    open_round, waited_for, stepped, failed, assigned = (a_target(8) for _ in range(5))
    open_round.rounds.contribute([0], 4, None)  # type: ignore[arg-type]
    waited_for.parked.append((4, ParkedRequest(b"", a_push([8]))))
    stepped.table.steps = 1
    failed.fail(3, MemoryError())
    assigned.use(None)
    for other in (open_round, waited_for, stepped, failed, assigned):
        assert not at_one_point([a_target(7), other])
    assert not at_one_point([assigned, assigned])


def test_union_answers_with_all_rows_that_the_round_has_changed_and_their_ids():
    desk = with_tables()
    optimized(desk, lr=1.0)
    a, b = desk.workers
    mine, theirs = push_rows(a, {7: {1: (1, 0), 5: (1, 0)}}, union=True), push_rows(b, {7: {2: (1, 0)}}, union=True)
    desk.ask(a, mine)
    replies = desk.ask(b, theirs)
    for reply in replies.values():
        assert rows_in(reply) == [[[-1, 0]] * 3]
        assert np.frombuffer(reply.buffers[1], np.int32).tolist() == [1, 2, 5]


def test_which_rows_have_changed_is_known_of_the_last_rounds_only():
    rounds: Rounds[RowContribution] = Rounds([0])
    target = RowTarget(7, "t", Table(shape=(9, 2)), 0, 1, rounds)
    message = np.arange(9)
    for clock in range(1, KEPT + 3):
        rounds.contribute([0], clock, RowContribution([0], clock, message, np.zeros((9, 2)), UpdateHyperparameters()))
        rounds.complete()
        target.note_changed(message[clock : clock + 1])
    assert {version: ids.tolist() for version, ids in target.changed.items()} == {
        version: [version] for version in range(3, KEPT + 3)
    }
    assert all(ids.base is None for ids in target.changed.values())  # the message may go


def test_a_segment_of_a_table_is_one_target():
    target = RowTarget(7, "t", Table(dim=3), 1, 2, Rounds([0]))
    assert (target.ids, target.segments.keys, target.width, target.dtype) == ((7,), ["t"], 3, "float32")
    assert str(target.segments.specs[0]) == "a table of float32[*, 3]"
    assert (target.table.stripe, target.table.stripes) == (1, 2)
