"""Tables whose rows are used together: with slabs in common, and without, as with each table for itself."""

import numpy as np
import pytest

from kvstore.optim.row_rules import RowState
from kvstore.rows.joint_tables import JointTables
from kvstore.rows.row_table import RowTable
from kvstore.rows.slab_space import SlabSpace
from kvstore.table import MinCount, Table, Unseen

WIDTH = 4
STATES = {"mean": RowState(None, "float32"), "norm": RowState(1, "float64", 2.0)}
KINDS = {
    "fixed": [
        Table(shape=(50, WIDTH), init="normal"),
        Table(shape=(30, WIDTH)),
        Table(shape=(40, WIDTH), init="uniform"),
    ],
    "growing": [Table(dim=WIDTH, init="normal"), Table(dim=WIDTH), Table(dim=WIDTH, seed=3)],
    "mixed": [Table(dim=WIDTH, init="normal"), Table(shape=(50, WIDTH)), Table(dim=WIDTH, admit=MinCount(1))],
}


def made(kind, space):
    """Tables of ``kind`` whose even rows are there: of each value and state, its table's number and its id."""
    tables = [RowTable(table, states=STATES, space=space) for table in KINDS[kind]]
    for number, table in enumerate(tables):
        ids = np.arange(0, 30, 2)
        values = np.repeat(1000 * number + ids, WIDTH).reshape(-1, WIDTH).astype(np.float32)
        parts = {"state.mean": values + 0.25, "state.norm": values[:, :1].astype(np.float64) + 0.5}
        table.put(ids, values, parts, version=3 + number)
    return tables


def joined(ids):
    """The ids of all tables, and where those of each begin."""
    return np.concatenate(ids), np.cumsum([0, *map(len, ids)]).tolist()


def state(tables):
    """All that the tables hold."""
    found = []
    for table in tables:
        frozen = table.freeze()
        ids, rows, parts = frozen.page(0, frozen.slots)
        frozen.thaw()
        order = np.argsort(ids)
        found += [part[order].tolist() for part in (ids, rows, *parts.values())] + [table.version, table.steps]
    return found


@pytest.fixture(params=["together", "apart"])
def space(request):
    return SlabSpace(4 * WIDTH) if request.param == "together" else None


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_read_changed_and_written_as_one_by_one(kind, space):
    tables, others = made(kind, space), made(kind, None)
    ids = [np.array([2, 8]), np.array([], np.int64), np.array([0, 8, 14, 28])]
    joint = JointTables(tables)
    places = joint.live(*joined(ids))
    assert (places.at is not None) == (space is not None)
    rows, states = (
        np.empty((6, WIDTH), np.float32),
        {"mean": np.empty((6, WIDTH), np.float32), "norm": np.empty((6, 1))},
    )
    joint.gather(places, rows, states)
    assert rows[:, 0].tolist() == [2, 8, 2000, 2008, 2014, 2028]
    assert (states["mean"][:, 1] - rows[:, 1]).tolist() == [0.25] * 6
    assert (states["norm"][:, 0] - rows[:, 1]).tolist() == [0.5] * 6
    frozen = tables[2].freeze()
    joint.write([(places, rows + 1, {name: -value for name, value in states.items()})])
    assert frozen.page(0, frozen.slots).rows[:, 0].tolist() == [2000 + each for each in range(0, 30, 2)]
    frozen.thaw()
    for table, own, part in zip(others, ids, places.parts, strict=True):
        slots = RowTable.found_in_all([table], own, [0, len(own)])
        table.stepped([slots])
        table.write(slots, rows[part] + 1, {name: -value[part] for name, value in states.items()})
    assert state(tables) == state(others)


@pytest.mark.parametrize("kind", KINDS)
def test_no_places_where_a_row_is_missing(kind, space):
    joint = JointTables(made(kind, space))
    assert joint.live(np.array([2, 3, 2]), [0, 1, 2, 3]) is None
    assert joint.live(np.array([], np.int64), [0] * 4).slots.tolist() == []


@pytest.mark.parametrize("kind", KINDS)
def test_pulled_rows_are_those_of_each_table_missing_ones_too(kind, space):
    tables = made(kind, space)
    for ids in ([[5, 2, 2, 29], [], [1, 28]], [[], [3], []], [[], [], []], [[0], [0], [0]]):
        ids = [np.array(own, np.int64) for own in ids]
        starts = np.cumsum([0, *map(len, ids)])
        pulled, expected = np.full((2, starts[-1], WIDTH), np.nan, np.float32)
        JointTables(tables).pull(*joined(ids), pulled)
        for table, own, start, stop in zip(tables, ids, starts, starts[1:], strict=False):
            table.pull(own, expected[start:stop])
        assert pulled.tolist() == expected.tolist()
        assert not np.isnan(pulled).any()


def test_rows_that_count_as_gone_are_not_pulled(space):
    tables = [RowTable(Table(dim=WIDTH, init="constant", scale=7, evict=Unseen(2)), space=space) for _ in range(2)]
    for table in tables:
        table.update(np.array([1]), np.ones((1, WIDTH), np.float32), None)
    for _ in range(3):
        tables[0].update(np.array([2]), np.ones((1, WIDTH), np.float32), None)
    out = np.empty((2, WIDTH), np.float32)
    JointTables(tables).pull(np.array([1, 1]), [0, 1, 2], out)
    assert out[:, 0].tolist() == [7, 1]


def test_a_table_of_its_own_among_others(space):
    tables = [*made("fixed", space)[:2], made("fixed", None)[2]]
    places = JointTables(tables).live(np.array([2] * 3), [0, 1, 2, 3])
    assert places.at is None


def test_places_rise_where_those_of_fixed_tables_do(space):
    tables = made("fixed", space)
    assert JointTables(tables).rise == (space is not None)
    assert not JointTables(tables[::-1]).rise
    assert not JointTables(made("growing", space)).rise
