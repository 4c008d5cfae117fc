"""How rows go, and what each of them has, in one stripe of a table."""

import numpy as np
import pytest
from row_rules import Momentum

from kvstore.errors import Mismatch, UsageError
from kvstore.rows.row_table import RowTable
from kvstore.rows.slabs import HUGE, MappedMemory
from kvstore.table import Capacity, Table

WIDTH = 3


def _ids(ids):
    return np.array(ids, np.int64)


def _grads(ids, number):
    return np.random.default_rng(number).standard_normal((len(ids), WIDTH)).astype(np.float32)


def _pulled(table, ids):
    out = np.full((len(ids), WIDTH), 7, np.float32)
    table.pull(_ids(ids), out)
    return out


@pytest.mark.parametrize("by", ["age", "count"])
def test_capacity_lets_those_go_that_were_touched_longest_ago_or_least_often(by):
    table = RowTable(Table(dim=WIDTH, evict=Capacity(3, by)))
    for ids in ([1], [1], [1], [2], [3], [3]):
        table.update(_ids(ids), _grads(ids, 0), None)
    changed = table.update(_ids([4]), _grads([4], 0), None)
    left = {"age": [2, 3, 4], "count": [1, 3, 4]}[by]
    assert sorted(table.freeze().page(0, 999).ids.tolist()) == left
    assert changed.tolist() == [4]
    assert table.statistics()["evicted"] == 1


def test_a_push_of_more_new_rows_than_the_capacity_keeps_so_many_and_says_which():
    table = RowTable(Table(dim=WIDTH, evict=Capacity(5)))
    ids = list(range(20))
    changed = table.update(_ids(ids), _grads(ids, 0), None)
    assert len(table) == len(changed) == 5
    assert sorted(table.freeze().page(0, 999).ids.tolist()) == changed.tolist()


def test_a_large_table_makes_room_for_a_sixteenth_at_once():
    table = RowTable(Table(dim=1, evict=Capacity(160)))
    for number in range(161):
        table.update(_ids([number]), np.ones((1, 1), np.float32), None)
    assert table.freeze().page(0, 999).ids.min() == 11
    assert len(table) == 150


def test_states_of_another_rule_are_dropped_and_its_steps_counted_anew():
    table, rule = RowTable(Table(dim=WIDTH)), Momentum()
    table.use(rule)
    table.update(_ids([1]), _grads([1], 0), rule)
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
    table.update(_ids([1]), _grads([1], 0), rule)
    rows = np.arange(2.0 * WIDTH, dtype=np.float32).reshape(2, WIDTH)
    parts = {"seen": np.array([4, 9]), "count": np.array([1, 1]), "state.moment": rows + 1}
    table.put(_ids([1, 2]), rows, parts, version=9, steps=8)
    page = table.freeze().page(0, 999)
    assert np.array_equal(_pulled(table, [1, 2]), rows)
    assert np.array_equal(page.parts["state.moment"], rows + 1)
    assert (page.parts["seen"].tolist(), table.version, table.steps) == ([4, 9], 9, 8)
    table.put(_ids([2]), rows[:1], {}, version=None)
    page = table.freeze().page(0, 999)
    assert (page.parts["state.moment"][1] == 0.5).all()
    with pytest.raises(UsageError, match=r"state\.other"):
        table.put(_ids([1]), rows[:1], {"state.other": rows[:1]}, None)
    with pytest.raises(Mismatch, match=r"'state\.moment' of 1 rows"):
        table.put(_ids([1]), rows[:1], {"state.moment": rows}, None)
    with pytest.raises(Mismatch, match="1 rows"):
        table.put(_ids([1]), rows, {}, None)
    with pytest.raises(UsageError, match="comes twice"):
        table.put(_ids([1, 1]), rows, {}, None)


def test_slabs_of_a_new_optimizer_get_huge_pages_for_the_rows_that_are_there(monkeypatch):
    asked = []
    monkeypatch.setattr(MappedMemory, "ask", lambda memory, number: asked.append((memory, number)))
    table = RowTable(Table(shape=(HUGE // (4 * WIDTH), WIDTH)))
    every_page = np.arange(0, table.table.rows, 300)
    table.update(every_page, np.ones((len(every_page), WIDTH), np.float32), None)
    rows = table.slabs[""].memory
    assert (rows, 0) in asked
    asked.clear()
    table.use(Momentum())
    table.update(_ids([0]), _grads([0], 0), None)
    assert (table.slabs["state.moment"].memory, 0) in asked
