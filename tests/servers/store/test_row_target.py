"""The stripe of a table, and which rows its last rounds have changed."""

from __future__ import annotations

import numpy as np
from asking import optimized
from asking_rows import (
    push_rows,
    rows_in,
    with_tables,
)

from kvstore.table import Table
from servers.store.hyperparameters import UpdateHyperparameters
from servers.store.rounds import Rounds
from servers.store.row_target import KEPT, RowContribution, RowTarget


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
