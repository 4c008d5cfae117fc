"""Updates of a group of tables, and why they are not made. ``test_grouped_pushes`` compares them with others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.errors import Mismatch, ServerError, WeightsInDoubt
from kvstore.optim.optimizer import describe
from kvstore.optim.row_updater import RowUpdater
from kvstore.rows.sums import RowBatch
from kvstore.rule import Rule
from kvstore.table import Table
from kvstore.transport.memory import Heap
from servers.store.buckets import Buckets
from servers.store.hyperparameters import UpdateHyperparameters
from servers.store.recording import Recording
from servers.store.rounds import Rounds
from servers.store.row_target import GroupContribution, RowTarget, TableGroup
from servers.store.row_updates import RowUpdates
from servers.store.updates import Updates

SGD = describe("sgd", {"learning_rate": 1.0})


@pytest.fixture
def group() -> TableGroup:
    targets = [RowTarget(n, f"t{n}", Table(shape=(9, 4)), 0, 1, Rounds([0, 1, 2])) for n in (7, 8)]
    for target in targets:
        target.use(RowUpdater(SGD, target.key, "float32", 4, grows=False))
    return TableGroup(targets)


@pytest.fixture
def updates() -> RowUpdates:
    rule, recording = Rule("sync"), Recording()
    buckets = Buckets(lambda: Rounds([0, 1, 2]), Heap(), recording)
    arrays = Updates(rule, buckets, Heap(), recording)
    return RowUpdates(rule, buckets, arrays.row_hyperparameters, recording, Heap())


def items(*ids: int, lr: Any = None) -> list[GroupContribution]:
    """Of each worker a row of ones, of the second table."""
    return [
        GroupContribution(
            [rank],
            1,
            RowBatch(np.array([each]), np.ones((1, 4), np.float32), [0, 0, 1]),
            UpdateHyperparameters(lr and lr * (rank + 1)),
            None,
        )
        for rank, each in enumerate(ids)
    ]


def rows(group: TableGroup, *ids: int) -> list[float]:
    out = np.empty((len(ids), 4), np.float32)
    group.tables[1].pull(np.array(ids), out)
    found: list[float] = out[:, 0].tolist()
    return found


@pytest.mark.parametrize(("ids", "expected"), [((2, 5), [-1, -1]), ((2, 2), [-2, 0]), ((5, 2, 2), [-2, -1])])
def test_rows_that_are_there_or_made_are_stepped_with_the_sum(
    group: TableGroup, updates: RowUpdates, ids: tuple[int, ...], expected: list[float]
) -> None:
    assert updates.close_group(group, items(*ids)) is None
    assert rows(group, 2, 5) == expected
    assert updates.close_group(group, items(*ids)) is None
    assert rows(group, 2, 5) == [2 * each for each in expected]
    assert [(table.version, table.steps) for table in group.tables] == [(2, 2)] * 2


def test_workers_that_disagree_change_nothing(group: TableGroup, updates: RowUpdates) -> None:
    error = updates.close_group(group, items(2, 5, lr=0.5))
    assert isinstance(error, Mismatch)
    assert "for the same round of 't7'" in str(error)
    assert [table.version for table in group.tables] == [0, 0]


def test_an_update_that_fails_says_whether_rows_have_changed(
    group: TableGroup, updates: RowUpdates, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert updates.close_group(group, items(2, 2)) is None

    def failing(*_: Any, **__: Any) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr("kvstore.optim.row_updater.RowUpdater.step", failing)
        error = updates.close_group(group, items(2, 2))
    assert isinstance(error, ServerError)
    assert "no row of this update of 't7', 't8' has changed" in str(error)
    assert rows(group, 2) == [-2]
    monkeypatch.setattr("kvstore.rows.row_table.scatter", failing)
    error = updates.close_group(group, items(2, 2))
    assert isinstance(error, WeightsInDoubt)
    assert "an update of 't7', 't8' failed in the middle" in str(error)
    monkeypatch.undo()
    assert str(updates.close_group(group, items(2, 2))) == str(error)
