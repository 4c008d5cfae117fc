"""Updates of several tables with one step: the bits of each are those of an update of its own."""

import numpy as np
import pytest

from kvstore.optim.optimizer import describe
from kvstore.optim.updater import OWN, RowUpdater
from kvstore.rows.row_table import RowTable
from kvstore.rows.sums import RowBatch
from kvstore.rows.updates import can_step_together, update_together
from kvstore.table import MinCount, Table

DESCRIBED = [Table(shape=(9, 4), init="normal"), Table(dim=4, init="uniform", admit=MinCount(2)), Table(dim=4)]


def _tables(optimizer):
    tables = [RowTable(table) for table in DESCRIBED]
    updaters = [
        None if optimizer is None else RowUpdater(optimizer, place, "float32", 4, table.grows)
        for place, table in enumerate(DESCRIBED)
    ]
    for table, updater in zip(tables, updaters, strict=True):
        table.use(updater)
    return tables, updaters


@pytest.mark.parametrize("name", [None, "sgd", "adam"])
def test_the_bits_are_those_of_single_updates(name):
    optimizer = (
        None if name is None else describe(name, {"learning_rate": 0.1, "momentum": 0.9} if name == "sgd" else {})
    )
    together, updaters = _tables(optimizer)
    alone, own = _tables(optimizer)
    rng = np.random.default_rng(0)
    for _ in range(4):
        ids = [np.sort(rng.choice(9, count, replace=False)) for count in rng.integers(0, 9, 3)]
        rows = rng.standard_normal((sum(map(len, ids)), 4)).astype(np.float32)
        starts = np.cumsum([0, *map(len, ids)]).tolist()
        for place, table in enumerate(alone):
            table.update(ids[place], rows[starts[place] : starts[place + 1]].copy(), own[place])
        assert can_step_together(together, updaters)
        update_together(together, RowBatch(np.concatenate(ids), rows, starts), updaters[0], OWN)
    for table, other in zip(together, alone, strict=True):
        pulled = np.empty((2, 9, 4), np.float32)
        table.pull(np.arange(9), pulled[0])
        other.pull(np.arange(9), pulled[1])
        assert pulled[0].tobytes() == pulled[1].tobytes()
        assert table.statistics() == other.statistics()
        assert (table.version, table.steps) == (4, 0 if name is None else 4)


def test_tables_with_rates_or_counts_of_their_own_need_steps_of_their_own():
    described = describe("sgd", {"learning_rate": 0.1, "lr_mult": {1: 0.5}})
    tables, updaters = _tables(described)
    assert not can_step_together(tables, updaters)
    assert can_step_together(tables[::2], updaters[::2])
    tables[0].update(np.array([1]), np.ones((1, 4), np.float32), updaters[0])
    assert not can_step_together(tables[::2], updaters[::2])


def test_if_the_step_fails_no_row_has_changed():
    tables, updaters = _tables(describe("sgd", {}))

    class Failing(RowUpdater):
        def step(self, *_):
            raise RuntimeError("no")

    failing = Failing(describe("sgd", {}), 0, "float32", 4, False)
    with pytest.raises(RuntimeError):
        update_together(tables[::2], RowBatch(np.array([1, 2]), np.ones((2, 4), np.float32), [0, 1, 2]), failing, OWN)
    assert [table.version for table in tables] == [0, 0, 0]
    assert updaters[0] is not None
