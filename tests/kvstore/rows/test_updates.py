"""Updates of several tables with one step: the bits of each are those of an update of its own."""

import numpy as np
import pytest

from kvstore.optim.optimizer import describe
from kvstore.optim.updater import OWN, RowUpdater
from kvstore.rows.row_table import RowTable
from kvstore.rows.sums import RowBatch, sum_batches
from kvstore.rows.updates import can_step_together, update_there, update_together
from kvstore.table import MinCount, Table, Unseen

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


COUNT = 500  # rows of a table
RULES = {
    "sgd": {},
    "nag": {"momentum": 0.9},
    "adam": {"weight_decay": 0.1},
    "adagrad": {"rescale_grad": 0.5},
    "rowwiseadam": {},
    "ftrl": {"clip_gradient": 1.0},
    "adabelief": {},
}


def _parted_tables(name, width, described=None):
    described = described or [Table(shape=(COUNT, width), init="normal"), Table(dim=width, init="uniform")]
    tables = [RowTable(table) for table in described]
    updaters = [
        RowUpdater(describe(name, {"learning_rate": 0.1, **RULES[name]}), 0, "float32", width, table.table.grows)
        for table in tables
    ]
    ids = np.arange(COUNT)
    for table, updater in zip(tables, updaters, strict=True):
        table.use(updater)
        table.update(ids, np.ones((COUNT, width), np.float32), updater)
    return tables, updaters


def _batch(rng, counts, width, most=COUNT):
    ids = [np.sort(rng.choice(most, count, replace=False)) for count in counts]
    rows = rng.standard_normal((sum(counts), width)).astype(np.float32)
    rows.flags.writeable = False
    return RowBatch(np.concatenate(ids), rows, [0, *np.cumsum(counts).tolist()])


def _all_of(tables, width):
    pulled = np.empty((len(tables), COUNT, width), np.float32)
    for table, out in zip(tables, pulled, strict=True):
        table.pull(np.arange(COUNT), out)
    return pulled.tobytes(), [table.statistics() for table in tables], [table.steps for table in tables]


@pytest.mark.parametrize("width", [1, 3, 16])
@pytest.mark.parametrize("name", RULES)
def test_the_bits_are_those_of_the_sums(name, width):
    parts, updaters = _parted_tables(name, width)
    summed, others = _parted_tables(name, width)
    rng = np.random.default_rng(width)
    for counts in ([(70, 1), (90, 30)], [(0, 60), (40, 50)], [(0, 0), (3, 0)], [(1, 1), (1, 1)], [(100, 99)]):
        batches = [_batch(rng, of, width) for of in counts]
        made = update_there(parts, batches, updaters[0], OWN, [np.empty] * len(batches))
        assert made is not None
        update_together(summed, sum_batches(batches), others[0], OWN)
        assert _all_of(parts, width) == _all_of(summed, width)
        for batch, rows in zip(batches, made, strict=True):
            own = np.empty(rows.shape, np.float32)
            for table, start, stop in zip(parts, batch.starts, batch.starts[1:], strict=False):
                table.pull(batch.ids[start:stop], own[start:stop])
            assert rows.tobytes() == own.tobytes(), "the new rows, in the order of those that were pushed"


def test_a_table_that_is_read_page_by_page_stays_as_it_was():
    tables, updaters = _parted_tables("sgd", 3)
    frozen = [table.freeze() for table in tables]
    before = [table.freeze().page(0, COUNT) for table in tables]
    batch = _batch(np.random.default_rng(1), (80, 80), 3)
    other = RowBatch(np.arange(20, 30), batch.rows[:10], [0, 10, 10])
    assert update_there(tables, [batch, other], updaters[0], OWN, [np.empty] * 2) is not None
    for page, kept in zip(before, frozen, strict=True):
        again = kept.page(0, COUNT)
        assert (again.ids.tolist(), again.rows.tobytes()) == (page.ids.tolist(), page.rows.tobytes())


@pytest.mark.parametrize("what", ["alike", "alike in one table", "new rows", "rows that go"])
def test_what_is_better_or_only_done_with_sums_changes_nothing(what):
    described = [Table(dim=3, evict=Unseen(rounds=5))] if what == "rows that go" else None
    tables, updaters = _parted_tables("sgd", 3, described)
    rng = np.random.default_rng(1)
    counts = (60,) if described else (60, 0 if what == "alike" else 2)
    first, second = (_batch(rng, counts, 3, COUNT + (9 if what == "new rows" else 0)) for _ in range(2))
    if what == "alike":
        second = first
    elif what == "alike in one table":
        second = RowBatch(first.ids[:60], first.rows[:60], [0, 60, 60])
    elif what == "new rows":
        second = RowBatch(np.array([COUNT + 3]), second.rows[:1], [0, 0, 1])
    before = _all_of(tables, 3)
    assert update_there(tables, [first, second], updaters[0], OWN, [np.empty] * 2) is None
    assert _all_of(tables, 3) == before


def test_if_the_step_with_parts_fails_no_row_has_changed():
    tables, _ = _parted_tables("sgd", 3)

    class Failing(RowUpdater):
        steps = 0

        def step(self, count, rows, *others, **more):
            self.steps += 1
            rows.zero_()
            if self.steps == 2:
                raise RuntimeError("no")

    failing, rng, before = (
        Failing(describe("sgd", {}), 0, "float32", 3, False),
        np.random.default_rng(2),
        _all_of(tables, 3),
    )
    with pytest.raises(RuntimeError):
        update_there(tables, [_batch(rng, (40, 40), 3) for _ in range(2)], failing, OWN, [np.empty] * 2)
    assert _all_of(tables, 3) == before


@pytest.mark.parametrize(("second", "apart"), [(range(4000), False), (range(3000, 7000), True), (range(0), True)])
def test_of_many_rows_a_sample_tells_whether_they_are_alike(second, apart):
    table = RowTable(Table(shape=(7000, 1)))
    updater = RowUpdater(describe("sgd", {"learning_rate": 1.0}), 0, "float32", 1, False)
    table.use(updater)
    ones = np.ones((7000, 1), np.float32)
    table.update(np.arange(7000), ones.copy(), updater)
    batches = [RowBatch(np.array(ids, np.int64), ones[: len(ids)], [0, len(ids)]) for ids in (range(3400), second)]
    made = update_there([table], batches, updater, OWN, [np.empty] * 2)
    assert (made is not None) == apart
    pulled = np.empty((7000, 1), np.float32)
    table.pull(np.arange(7000), pulled)
    sums = np.bincount([*range(3400), *second] if apart else [], minlength=7000)
    assert np.array_equal(pulled[:, 0], -1.0 - sums)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("kind", [0, 1])
def test_an_update_of_rows_that_are_there_has_the_bits_of_any_update(name, kind):
    rng, width = np.random.default_rng(3), 4
    tables, updaters = _parted_tables(name, width)
    one, other, updater = tables[kind], _parted_tables(name, width)[0][kind], updaters[kind]
    batch = _batch(rng, [40], width)
    before = batch.rows.copy()
    (rows,) = update_there([one], [batch], updater, OWN, [np.empty])
    other.update(batch.ids, before.copy(), updater)
    assert (batch.rows == before).all()
    assert (one.version, one.steps) == (other.version, other.steps)
    expected = np.empty((40, width), np.float32)
    other.pull(batch.ids, expected)
    assert rows.tobytes() == expected.tobytes()
    assert _all_of([one], width) == _all_of([other], width)


def test_rows_that_are_to_be_made_and_tables_whose_rows_go_are_updated_otherwise():
    updater = RowUpdater(describe("sgd", {"learning_rate": 0.1}), 0, "float32", 4, False)
    for table in (RowTable(Table(shape=(9, 4))), RowTable(Table(dim=4)), RowTable(Table(dim=4, evict=[Unseen(3)]))):
        table.use(updater)
        batch = RowBatch(np.array([1, 3]), np.ones((2, 4), np.float32), [0, 2])
        assert update_there([table], [batch], updater, OWN, [np.empty]) is None
        assert table.version == 0
