"""How rows go, and what each of them has, in one stripe of a table."""

import gc
import weakref

import numpy as np
import pytest
from row_rules import WIDTH, Momentum, grads_of, ids_of, pulled

from kvstore.errors import Mismatch, UsageError
from kvstore.rows import stripe
from kvstore.rows.row_table import RowTable
from kvstore.rows.slab_space import GrownTables, SlabSpace
from kvstore.rows.slabs import MappedMemory
from kvstore.table import Capacity, Table


@pytest.mark.parametrize("by", ["age", "count"])
def test_capacity_lets_those_go_that_were_touched_longest_ago_or_least_often(by):
    table = RowTable(Table(dim=WIDTH, evict=Capacity(3, by)))
    for ids in ([1], [1], [1], [2], [3], [3]):
        table.update(ids_of(ids), grads_of(ids, 0), None)
    changed = table.update(ids_of([4]), grads_of([4], 0), None)
    left = {"age": [2, 3, 4], "count": [1, 3, 4]}[by]
    assert sorted(table.freeze().page(0, 999).ids.tolist()) == left
    assert changed.tolist() == [4]
    assert table.statistics()["evicted"] == 1


def test_a_push_of_more_new_rows_than_the_capacity_keeps_so_many_and_says_which():
    table = RowTable(Table(dim=WIDTH, evict=Capacity(5)))
    ids = list(range(20))
    changed = table.update(ids_of(ids), grads_of(ids, 0), None)
    assert len(table) == len(changed) == 5
    assert sorted(table.freeze().page(0, 999).ids.tolist()) == changed.tolist()


def test_a_large_table_makes_room_for_a_sixteenth_at_once():
    table = RowTable(Table(dim=1, evict=Capacity(160)))
    for number in range(161):
        table.update(ids_of([number]), np.ones((1, 1), np.float32), None)
    assert table.freeze().page(0, 999).ids.min() == 11
    assert len(table) == 150


def test_states_of_another_rule_are_dropped_and_its_steps_counted_anew():
    table, rule = RowTable(Table(dim=WIDTH)), Momentum()
    table.use(rule)
    table.update(ids_of([1]), grads_of([1], 0), rule)
    table.use(Momentum())
    assert (table.steps, table.version) == (1, 1)
    other = Momentum(rule="other")
    table.use(other)
    assert (table.steps, table.version) == (0, 1)
    assert (table.freeze().page(0, 1).parts["state.moment"] == 0.5).all()
    table.use(None)
    assert table.freeze().names == ("seen",)


def test_put_replaces_rows_with_their_states_and_checks_them():
    table, rule = RowTable(Table(dim=WIDTH)), Momentum()
    table.use(rule)
    table.update(ids_of([1]), grads_of([1], 0), rule)
    rows = np.arange(2.0 * WIDTH, dtype=np.float32).reshape(2, WIDTH)
    parts = {"seen": np.array([4, 9]), "count": np.array([1, 1]), "state.moment": rows + 1}
    table.put(ids_of([1, 2]), rows, parts, version=9, steps=8)
    page = table.freeze().page(0, 999)
    assert np.array_equal(pulled(table, [1, 2]), rows)
    assert np.array_equal(page.parts["state.moment"], rows + 1)
    assert (page.parts["seen"].tolist(), table.version, table.steps) == ([4, 9], 9, 8)
    table.put(ids_of([2]), rows[:1], {}, version=None)
    page = table.freeze().page(0, 999)
    assert (page.parts["state.moment"][1] == 0.5).all()
    with pytest.raises(UsageError, match=r"state\.other"):
        table.put(ids_of([1]), rows[:1], {"state.other": rows[:1]}, None)
    with pytest.raises(Mismatch, match=r"'state\.moment' of 1 rows"):
        table.put(ids_of([1]), rows[:1], {"state.moment": rows}, None)
    with pytest.raises(Mismatch, match="1 rows"):
        table.put(ids_of([1]), rows, {}, None)
    with pytest.raises(UsageError, match="comes twice"):
        table.put(ids_of([1, 1]), rows, {}, None)


@pytest.fixture
def touched(monkeypatch):
    """The bytes of each memory that have been touched ahead, by the memory: where they begin, and where they end."""
    ranges: dict = {}
    touch = MappedMemory.touch

    def noted(memory, start, stop):
        begin, end = ranges.get(memory, (start, start))
        assert start == end, "without a gap, each once"
        ranges[memory] = begin, stop
        touch(memory, start, stop)

    monkeypatch.setattr(MappedMemory, "touch", noted)
    # Tests before may have reserved so much that a table would get no more than it needs.
    monkeypatch.setattr("kvstore.rows.slabs.virtual_bytes", lambda: 0)
    return ranges


def _wide_table(space, **described):
    table = RowTable(Table(**described), space=space)
    table.use(Momentum())
    return table


@pytest.mark.parametrize("described", [{"dim": 256}, {"shape": (100_000, 256)}])
def test_memory_is_touched_for_as_many_rows_as_came_and_a_quarter_more(touched, described):
    grown = GrownTables()
    table = _wide_table(SlabSpace(1024, grown=grown), **described)
    came = 0
    for count in (400, 800):
        ids = 7 * np.arange(came, came + count)
        table.update(ids, np.ones((count, 256), np.float32), Momentum())
        came += count
        before = [slab.items[:came].copy() for slab in table.slabs.values()]
        touched.clear()
        while grown:
            grown.work()
        wanted = {
            slab.memory: (slab.item_bytes * came, slab.item_bytes * (came + count * 5 // 4))
            for slab in table.slabs.values()
        }
        assert {memory: touched.get(memory) for memory in wanted} == wanted
        assert len(touched) == len(wanted) + 1, "the ids of the slots, too"
        for slab, values in zip(table.slabs.values(), before, strict=True):
            assert np.array_equal(slab.items[:came], values)
            assert not slab.items[came : 2 * came].any()


def test_no_more_memory_is_touched_than_a_quarter_of_what_is_there_or_what_is_always_foreseen(touched, monkeypatch):
    monkeypatch.setattr(stripe, "FORESEEN", 30 << 10)
    grown = GrownTables()
    table = _wide_table(SlabSpace(1024, grown=grown), dim=256)
    rows = table.slabs[""]
    for number, ahead in enumerate((30, 50, 75)):
        ids = np.arange(100 * number, 100 * (number + 1))
        table.update(ids, np.ones((100, 256), np.float32), Momentum())
        while grown:
            grown.work()
        assert touched.pop(rows.memory)[1] == (100 * (number + 1) + ahead) * 1024
        touched.clear()


def test_for_a_table_that_is_loaded_nothing_is_touched(touched, monkeypatch):
    monkeypatch.setattr(stripe, "LOADED", 100 << 10)
    grown = GrownTables()
    table = _wide_table(SlabSpace(1024, grown=grown), dim=256)
    table.update(np.arange(100), np.ones((100, 256), np.float32), Momentum())
    while grown:
        grown.work()
    assert not touched


def test_what_is_touched_ahead_are_no_rows_of_others():
    grown = GrownTables()
    space = SlabSpace(12, grown=grown)
    tables = [_wide_table(space, shape=(1000, WIDTH)) for _ in range(3)]
    for number, table in enumerate(tables[::-1]):
        table.update(np.arange(900), np.full((900, WIDTH), number + 1, np.float32), None)
    while grown:
        grown.work()
    for number, table in enumerate(tables[::-1]):
        assert (table.slabs[""].items[:900] == number + 1).all()


def test_a_table_that_is_dropped_goes_at_once_and_is_not_touched():
    grown = GrownTables()
    table = _wide_table(SlabSpace(1024, grown=grown), dim=256)
    table.update(np.arange(100), np.ones((100, 256), np.float32), Momentum())
    gone = weakref.ref(table)
    gc.disable()
    try:
        del table
        assert gone() is None
    finally:
        gc.enable()
    grown.work()
    assert not grown
