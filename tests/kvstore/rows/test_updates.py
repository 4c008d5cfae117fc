"""Updates of several tables with one step: the bits of each are those of an update of its own."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.optim.optimizer import describe
from kvstore.optim.row_rules import RowState
from kvstore.optim.updater import OWN, RowUpdater
from kvstore.rows.joint_tables import JointTables
from kvstore.rows.row_table import RowTable
from kvstore.rows.slab_space import SlabSpace
from kvstore.rows.sums import RowBatch, coalesce, has_nan, sum_batches, sum_rows
from kvstore.rows.updates import can_step_together, update_parts, update_together
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
        made = update_parts(parts, batches, updaters[0], OWN, [np.empty] * len(batches))
        assert made is not None
        update_together(summed, sum_batches(batches), others[0], OWN)
        assert _all_of(parts, width) == _all_of(summed, width)
        for batch, rows in zip(batches, made, strict=True):
            own = np.empty(rows.shape, np.float32)
            for table, start, stop in zip(parts, batch.starts, batch.starts[1:], strict=False):
                table.pull(batch.ids[start:stop], own[start:stop])
            assert rows.tobytes() == own.tobytes(), "the new rows, in the order of those that were pushed"


NEW = {
    "fixed": [{"shape": (COUNT, 4)}] * 2,
    "growing": [{"dim": 4}] * 2,
    "both": [{"dim": 4}, {"shape": (COUNT, 4)}],
    "one": [{"dim": 4}],
}


@pytest.mark.parametrize("init", ["constant", "uniform", "normal", "several"])
@pytest.mark.parametrize("kind", NEW)
def test_rows_that_come_for_the_first_time_are_made_as_by_the_sums(kind, init):
    """Rows that one worker or both have pushed, new and old ones: what there is, and in which order it is saved."""

    def tables(space):
        inits = ["uniform", "normal"] if init == "several" else [init] * 2
        described = [
            Table(**each, init=one, scale=0.5, seed=3 + seed)
            for seed, (each, one) in enumerate(zip(NEW[kind], inits, strict=False))
        ]
        made = [RowTable(table, space=space) for table in described]
        updater = RowUpdater(describe("adagrad", {"learning_rate": 0.1}), 0, "float32", 4, False)
        for table in made:
            table.use(updater)
        return made, updater

    (parts, updater), (apart, _), (summed, _) = tables(SlabSpace(16, ROOM)), tables(None), tables(None)
    joint, rng = JointTables(parts), np.random.default_rng(5)
    for number, counts in enumerate([(70, 1), (90, 30), (0, 60), (40, 0), (0, 0), (80, 80)]):
        batches = [_batch(rng, counts[: len(parts)], 4) for _ in range(1 + number % 2)]
        frozen = [table.freeze() for table in parts]
        before = [[part.tobytes() for part in table.freeze().page(0, COUNT)[:2]] for table in parts]
        made = update_parts(parts, batches, updater, OWN, [np.empty] * len(batches), joint)
        other = update_parts(apart, batches, updater, OWN, [np.empty] * len(batches))
        sums = sum_batches(batches)
        for table, own in zip(summed, sums.of_each(), strict=True):
            table.update(*own, updater)
        assert [rows.tobytes() for rows in made] == [rows.tobytes() for rows in other]
        for batch, rows in zip(batches, made, strict=True):
            pulled = np.empty_like(rows)
            joint.pull(batch.ids, batch.starts, pulled)
            assert pulled.tobytes() == rows.tobytes()
        for one, page in zip(frozen, before, strict=True):
            assert [part.tobytes() for part in one.page(0, COUNT)[:2]] == page, "a save sees no row that came later"
            one.thaw()
        assert _saved(parts) == _saved(apart) == _saved(summed)


def _saved(tables):
    pages = [table.freeze().page(0, COUNT) for table in tables]
    parts = [[part.tobytes() for part in (page.ids, page.rows, *page.parts.values())] for page in pages]
    return parts, [table.rest()["numbers"].tolist() for table in tables]


def test_if_the_step_fails_no_row_is_made():
    table = RowTable(Table(dim=3))
    failing = RowUpdater(describe("sgd", {}), 0, "float32", 3, True)
    failing.step = lambda *_, **__: 1 / 0
    table.use(failing)
    batch = RowBatch(np.array([3, 4]), np.ones((2, 3), np.float32), [0, 2])
    with pytest.raises(ZeroDivisionError):
        update_parts([table], [batch], failing, OWN, [np.empty])
    with pytest.raises(ZeroDivisionError):
        table.update_part(batch.ids, batch.rows, np.empty, failing, OWN)
    assert (len(table), table.version) == (0, 0)


def test_a_table_that_is_read_page_by_page_stays_as_it_was():
    tables, updaters = _parted_tables("sgd", 3)
    frozen = [table.freeze() for table in tables]
    before = [table.freeze().page(0, COUNT) for table in tables]
    batch = _batch(np.random.default_rng(1), (80, 80), 3)
    other = RowBatch(np.arange(20, 30), batch.rows[:10], [0, 10, 10])
    assert update_parts(tables, [batch, other], updaters[0], OWN, [np.empty] * 2) is not None
    for page, kept in zip(before, frozen, strict=True):
        again = kept.page(0, COUNT)
        assert (again.ids.tolist(), again.rows.tobytes()) == (page.ids.tolist(), page.rows.tobytes())


@pytest.mark.parametrize("what", ["alike", "alike in one table", "rows that are admitted", "rows that go"])
def test_what_is_better_or_only_done_with_sums_changes_nothing(what):
    described = [Table(dim=3, evict=Unseen(rounds=5))] if what == "rows that go" else None
    if what == "rows that are admitted":
        described = [Table(shape=(COUNT, 3)), Table(dim=3, admit=MinCount(1))]
    tables, updaters = _parted_tables("sgd", 3, described)
    rng = np.random.default_rng(1)
    counts = (60,) if what == "rows that go" else (60, 0 if what == "alike" else 2)
    first, second = (_batch(rng, counts, 3) for _ in range(2))
    if what == "alike":
        second = first
    elif what == "alike in one table":
        second = RowBatch(first.ids[:60], first.rows[:60], [0, 60, 60])
    elif what == "rows that are admitted":
        second = RowBatch(np.array([COUNT + 3]), second.rows[:1], [0, 0, 1])
    before = _all_of(tables, 3)
    assert update_parts(tables, [first, second], updaters[0], OWN, [np.empty] * 2) is None
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
        update_parts(tables, [_batch(rng, (40, 40), 3) for _ in range(2)], failing, OWN, [np.empty] * 2)
    assert _all_of(tables, 3) == before


@pytest.mark.parametrize(("second", "apart"), [(range(4000), False), (range(3000, 7000), True), (range(0), True)])
def test_of_many_rows_a_sample_tells_whether_they_are_alike(second, apart):
    table = RowTable(Table(shape=(7000, 1)))
    updater = RowUpdater(describe("sgd", {"learning_rate": 1.0}), 0, "float32", 1, False)
    table.use(updater)
    ones = np.ones((7000, 1), np.float32)
    table.update(np.arange(7000), ones.copy(), updater)
    batches = [RowBatch(np.array(ids, np.int64), ones[: len(ids)], [0, len(ids)]) for ids in (range(3400), second)]
    made = update_parts([table], batches, updater, OWN, [np.empty] * 2)
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
    (rows,) = update_parts([one], [batch], updater, OWN, [np.empty])
    other.update(batch.ids, before.copy(), updater)
    assert (batch.rows == before).all()
    assert (one.version, one.steps) == (other.version, other.steps)
    expected = np.empty((40, width), np.float32)
    other.pull(batch.ids, expected)
    assert rows.tobytes() == expected.tobytes()
    assert _all_of([one], width) == _all_of([other], width)


def test_tables_that_choose_their_rows_are_updated_otherwise():
    updater = RowUpdater(describe("sgd", {"learning_rate": 0.1}), 0, "float32", 4, False)
    for table in (RowTable(Table(dim=4, admit=MinCount(2))), RowTable(Table(dim=4, evict=[Unseen(3)]))):
        table.use(updater)
        batch = RowBatch(np.array([1, 3]), np.ones((2, 4), np.float32), [0, 2])
        assert update_parts([table], [batch], updater, OWN, [np.empty]) is None
        assert table.version == 0


def _rows(count, width, seed=0):
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


def _one_by_one(ids, rows):
    sums = {}
    for number, row in zip(ids.tolist(), rows, strict=True):
        sums[number] = sums[number] + row if number in sums else row.copy()
    return np.array(sorted(sums), np.int64), np.array([sums[number] for number in sorted(sums)])


@settings(max_examples=40)
@given(
    st.lists(st.integers(-3, 12) | st.integers(-(2**63), 2**63 - 1), max_size=60), st.sampled_from([1, 2, 5]), st.data()
)
def test_duplicates_are_summed_in_order_of_position(ids, width, data):
    ids = np.array(ids * data.draw(st.integers(1, 3)), np.int64)
    rows = _rows(len(ids), width)
    got_ids, got = coalesce(ids, rows)
    want_ids, want = _one_by_one(ids, rows)
    assert got_ids.tolist() == want_ids.tolist()
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("width", [1, 3, 64])
def test_an_id_with_very_many_rows_is_summed_in_order_too(width):
    ids = np.random.default_rng(1).integers(0, 3, 1000)
    rows = _rows(1000, width)
    assert coalesce(ids, rows)[1].tobytes() == _one_by_one(ids, rows)[1].tobytes()


def test_ids_that_rise_are_returned_as_they_are():
    ids, rows = np.array([-4, 2, 9]), _rows(3, 2)
    assert coalesce(ids, rows)[0] is ids
    assert coalesce(ids, rows)[1] is rows


@settings(max_examples=40)
@given(st.lists(st.sets(st.integers(-4, 8), max_size=9).map(sorted), min_size=1, max_size=4))
def test_parts_are_summed_in_their_order(parts):
    parts = [(np.array(ids, np.int64), _rows(len(ids), 3, seed)) for seed, ids in enumerate(parts)]
    before = [rows.copy() for _, rows in parts]
    ids, sums = sum_rows(parts)
    want_ids, want = _one_by_one(np.concatenate([i for i, _ in parts]), np.concatenate([r for _, r in parts]))
    assert ids.tolist() == want_ids.tolist()
    assert sums.tobytes() == want.tobytes()
    assert all(np.array_equal(rows, old) for (_, rows), old in zip(parts, before, strict=True))


_SOME_IDS = st.sets(st.integers(-3, 5), max_size=6).map(sorted)


@settings(max_examples=60)
@given(st.integers(1, 3).flatmap(lambda tables: st.lists(st.tuples(*[_SOME_IDS] * tables), min_size=1, max_size=3)))
def test_batches_of_several_tables_are_summed_as_each_table_is(parts):
    batches = []
    for seed, tables in enumerate(parts):
        ids = np.array([number for table in tables for number in table], np.int64)
        starts = np.cumsum([0, *map(len, tables)]).tolist()
        batches.append(RowBatch(ids, _rows(len(ids), 3, seed), starts))
    summed = sum_batches(batches)
    assert len(summed.starts) == len(parts[0]) + 1
    for place in range(len(parts[0])):
        own = [slice(batch.starts[place], batch.starts[place + 1]) for batch in batches]
        ids, rows = sum_rows([(batch.ids[part], batch.rows[part]) for batch, part in zip(batches, own, strict=True)])
        part = slice(summed.starts[place], summed.starts[place + 1])
        assert summed.ids[part].tolist() == ids.tolist()
        assert summed.rows[part].tobytes() == rows.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "least", [[], [1], [np.inf], [np.inf, -np.inf], [-np.inf], [3e38, 3e38], [1e-45]], ids=lambda least: str(least)
)
def test_nan_is_found_whatever_else_there_is(dtype, least):
    rows = np.zeros((20, 7), dtype)
    rows.flat[: len(least)] = least
    assert not has_nan(rows)
    assert not has_nan(rows[:0])
    for place in (0, 70, 139):
        rows.flat[place] = np.nan
        assert has_nan(rows)
        rows.flat[place] = 0


def test_sums_overflow_and_underflow_in_silence_where_a_program_lets_numpy_raise():
    tiny, huge = np.float32(1e-30), np.float32(3e38)
    rows = np.array([[tiny, huge], [tiny, huge], [np.inf, tiny], [-np.inf, tiny]], np.float32)
    with np.errstate(all="raise"):
        ids, summed = coalesce(np.array([4, 4, 2, 2]), rows)
        twice = sum_rows([(ids, summed), (ids, summed)])[1]
        apart = sum_rows([(ids, summed), (ids[:1], summed[:1]), (ids[1:], summed[1:])])[1]
        merged = sum_rows([(ids, summed), (ids[1:], summed[1:])])[1]
        assert not has_nan(rows)
    assert ids.tolist() == [2, 4]
    assert np.isnan(summed[0, 0])
    assert summed[1].tolist() == [2 * tiny, np.inf]
    assert twice[1].tolist() == apart[1].tolist() == merged[1].tolist() == [4 * tiny, np.inf]


ROOM = 1 << 38  # bytes of addresses, for three tables that grow
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
    # Less than a server's: other tests' tables that are not collected yet may leave no 2 TB of addresses.
    return SlabSpace(4 * WIDTH, ROOM) if request.param == "together" else None


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_read_changed_and_written_as_one_by_one(kind, space):
    tables, others = made(kind, space), made(kind, None)
    ids = [np.array([2, 8]), np.array([], np.int64), np.array([0, 8, 14, 28])]
    joint = JointTables(tables)
    places = joint.places(*joined(ids))
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
        table.stepped()
        table.write(slots, rows[part] + 1, {name: -value[part] for name, value in states.items()})
    assert state(tables) == state(others)


@pytest.mark.parametrize("kind", KINDS)
def test_places_say_which_rows_are_missing(kind, space):
    joint = JointTables(made(kind, space))
    places = joint.places(np.array([2, 3, 2]), [0, 1, 2, 3])
    assert (places.new.tolist(), places.slots[1], tuple(places.new_ids)[1]) == ([1], -1, [0, 0, 1, 1])
    assert joint.places(np.array([], np.int64), [0] * 4).slots.tolist() == []


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
    places = JointTables(tables).places(np.array([2] * 3), [0, 1, 2, 3])
    assert places.at is None


def test_places_rise_where_those_of_fixed_tables_do(space):
    tables = made("fixed", space)
    assert JointTables(tables).rise == (space is not None)
    assert not JointTables(tables[::-1]).rise
    assert not JointTables(made("growing", space)).rise
