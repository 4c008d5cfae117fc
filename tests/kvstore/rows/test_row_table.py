"""A table against what a dict does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from row_rules import Momentum

import kvstore as kv
from kvstore.errors import UsageError
from kvstore.rows.admission import write_beginnings
from kvstore.rows.frozen_rows import Page
from kvstore.rows.row_table import RowStates, RowTable, split
from kvstore.rows.stripe import PartSpec
from kvstore.table import Capacity, MinCount, Probability, Table, Unseen

WIDTH = 3
IDS = st.integers(-6, 9) | st.sampled_from([2**63 - 1, -(2**63)])
PUSHES = st.lists(st.sets(IDS, max_size=8).map(sorted), max_size=14)


def _ids(ids):
    return np.array(ids, np.int64)


def _grads(ids, number):
    return np.random.default_rng(number).standard_normal((len(ids), WIDTH)).astype(np.float32)


def _pulled(table, ids):
    out = np.full((len(ids), WIDTH), 7, np.float32)
    table.pull(_ids(ids), out)
    return out


def _beginnings(table, ids):
    out = np.empty((len(ids), WIDTH), np.float32)
    write_beginnings(table, _ids(ids), out)
    return out


class _Model:
    """What a growing table is, in plain Python."""

    def __init__(self, table):
        self.table, self.rows, self.seen, self.counts, self.pushed, self.version = table, {}, {}, {}, {}, 0
        self.moments = {}

    def go(self):
        for rule in self.table.evict:
            for number in list(self.rows):
                if isinstance(rule, Unseen) and self.version - self.seen[number] > rule.rounds:
                    self.drop(number)

    def drop(self, number):
        for each in (self.rows, self.seen, self.counts, self.moments):
            each.pop(number, None)

    def update(self, ids, grads):
        self.version += 1
        for number, grad in zip(ids, grads, strict=True):
            if number not in self.rows:
                self.pushed[number] = self.pushed.get(number, 0) + 1
                if isinstance(self.table.admit, MinCount) and self.pushed[number] < self.table.admit.count:
                    continue
                self.pushed[number] = 0
                self.rows[number] = _beginnings(self.table, [number])[0]
                self.moments[number] = np.full(WIDTH, 0.5, np.float32)
            self.moments[number] = self.moments[number] * np.float32(0.5) + grad
            self.rows[number] = self.rows[number] - self.moments[number]
            self.seen[number] = self.version
            self.counts[number] = self.counts.get(number, 0) + 1
        self.go()

    def pull(self, ids):
        missing = np.zeros((1, WIDTH), np.float32)
        return np.array(
            [
                self.rows[n] if n in self.rows else (missing if self.table.admit else _beginnings(self.table, [n]))[0]
                for n in ids
            ]
        ).reshape(-1, WIDTH)


@settings(max_examples=30)
@given(
    PUSHES,
    st.sampled_from([None, MinCount(1), MinCount(3)]),
    st.none() | st.integers(1, 4).map(Unseen),
    st.lists(IDS, max_size=6),
)
def test_a_growing_table_has_the_rows_that_a_dict_has(pushes, admit, unseen, wanted):
    described = Table(dim=WIDTH, init="uniform", scale=0.1, seed=5, admit=admit, evict=[unseen] if unseen else [])
    table, model, rule = RowTable(described), _Model(described), Momentum()
    table.use(rule)
    for number, ids in enumerate(pushes):
        changed = table.update(_ids(ids), _grads(ids, number), rule)
        model.update(ids, _grads(ids, number))
        assert changed.tolist() == [n for n in ids if n in model.rows]
        assert np.array_equal(_pulled(table, wanted), model.pull(wanted))
        assert table.statistics()["rows"] == len(model.rows)
        assert table.version == table.steps == model.version
    frozen = table.freeze()
    page = frozen.page(0, 100)
    assert dict(zip(page.ids.tolist(), (page.parts["seen"] - 1).tolist(), strict=True)) == model.seen
    assert np.array_equal(page.rows, model.pull(page.ids.tolist()))
    for number, moment in zip(page.ids.tolist(), page.parts["state.moment"], strict=True):
        assert np.array_equal(moment, model.moments[number])


@settings(max_examples=20)
@given(PUSHES, st.integers(1, 3), st.booleans())
def test_stripes_have_together_what_one_table_has(pushes, stripes, grows):
    described = Table(dim=WIDTH, init="normal", seed=1) if grows else Table(shape=(10, WIDTH), init="normal", seed=1)
    if not grows:
        pushes = [[n for n in ids if 0 <= n < 10] for ids in pushes]
    whole, parts = RowTable(described), [RowTable(described, part, stripes) for part in range(stripes)]
    for number, ids in enumerate(pushes):
        grads = _grads(ids, number)
        whole.update(_ids(ids), grads.copy(), None)
        for part in parts:
            mine = [at for at, n in enumerate(ids) if _of(part, n)]
            part.update(_ids(ids)[mine], grads[mine], None)
    everything = [n for n in range(-6, 10) if grows or 0 <= n < 10]
    for part in parts:
        mine = [n for n in everything if _of(part, n)]
        assert np.array_equal(_pulled(part, mine), _pulled(whole, mine))
    assert sum(map(len, parts)) == len(whole)


def _of(part, number):
    try:
        part.require(_ids([number]))
    except UsageError:
        return False
    return True


def test_a_table_with_a_shape_begins_as_its_seed_says_and_holds_what_is_assigned():
    described = Table(shape=(5, WIDTH), init="uniform", seed=2)
    table = RowTable(described)
    assert np.array_equal(_pulled(table, [4, 0, 4]), _beginnings(described, [4, 0, 4]))
    assert len(table) == 0
    table.update(_ids([1, 4]), np.ones((2, WIDTH), np.float32), None)
    assert np.array_equal(_pulled(table, [1, 4]), np.ones((2, WIDTH)))
    assert np.array_equal(_pulled(table, [0]), _beginnings(described, [0]))


def test_a_rule_that_is_not_lazy_updates_all_rows_of_a_fixed_table():
    rule = Momentum(lazy=False)
    table, model = RowTable(Table(shape=(7, WIDTH), init="normal"), 1, 2), []
    table.use(rule)
    rows = torch.from_numpy(_beginnings(table.table, [1, 3, 5]))
    moments = torch.full((3, WIDTH), 0.5)
    for number, ids in enumerate([[5], [1, 3], []]):
        grads = _grads(ids, number)
        whole = torch.zeros(3, WIDTH)
        whole[[n // 2 for n in ids]] = torch.from_numpy(grads)
        moments = moments * 0.5 + whole
        rows = rows - moments
        model.append(table.update(_ids(ids), grads, rule).tolist())
        assert np.array_equal(_pulled(table, [1, 3, 5]), rows.numpy())
    assert model == [[1, 3, 5]] * 3
    with pytest.raises(UsageError, match="lazy_update=True"):
        RowTable(Table(dim=WIDTH)).update(_ids([1]), _grads([1], 0), rule)


def test_a_probability_admits_about_so_many_and_draws_again_with_each_push():
    table = RowTable(Table(dim=1, admit=Probability(0.25)))
    ids = np.arange(2000)
    table.update(ids, np.ones((2000, 1), np.float32), None)
    first = len(table)
    assert 400 < first < 600
    table.update(ids, np.ones((2000, 1), np.float32), None)
    assert 0.15 < (len(table) - first) / (2000 - first) < 0.35
    again = RowTable(Table(dim=1, admit=Probability(0.25)))
    again.update(ids, np.ones((2000, 1), np.float32), None)
    assert len(again) == first


def test_a_step_that_fails_changes_nothing():
    table, rule = RowTable(Table(dim=WIDTH)), Momentum()
    table.use(rule)
    table.update(_ids([1]), _grads([1], 0), rule)
    before = _pulled(table, [1, 2])
    with pytest.raises(RuntimeError):
        table.update(_ids([1, 2]), np.ones((2, WIDTH + 1), np.float32), rule)
    assert np.array_equal(_pulled(table, [1, 2]), before)
    assert (table.version, len(table)) == (1, 1)


def test_a_copy_goes_on_as_the_table_does():
    described = Table(dim=WIDTH, admit=MinCount(3), evict=[Unseen(4), Capacity(9, "count")], init="normal")
    table, rule, rng = RowTable(described), Momentum(), np.random.default_rng(0)
    table.use(rule)

    def push(number, *tables):
        ids = np.unique(rng.integers(0, 25, 8))
        return [each.update(ids, _grads(ids, number), rule).tolist() for each in tables]

    for number in range(40):
        push(number, table)
    copy = RowTable(described)
    copy.use(rule)
    page = table.freeze().page(0, 999)
    copy.put(page.ids, page.rows, page.parts, None)
    copy.restore(table.rest())
    for number in range(40, 90):
        one, two = push(number, table, copy)
        assert one == two
        assert np.array_equal(_pulled(table, range(25)), _pulled(copy, range(25)))
    assert table.statistics()["rows"] == copy.statistics()["rows"] > 0
    with pytest.raises(UsageError, match="admission"):
        RowTable(Table(dim=WIDTH)).restore(table.rest())


@pytest.mark.parametrize(("ids", "wrong"), [([1, 3, 9], "id 9 at position 2"), ([-1], "id -1"), ([1, 2], "id 2 at")])
def test_ids_of_others_are_refused(ids, wrong):
    with pytest.raises(UsageError, match=wrong):
        RowTable(Table(shape=(9, 2)), 1, 2).require(_ids(ids))


def test_a_lineage_goes_on_with_updates_and_ends_with_what_no_version_counts():
    table, rule = RowTable(Table(dim=WIDTH, evict=Capacity(4)), lineage=100), Momentum()
    lineages = []

    def note():
        lineages.append(table.at.lineage)

    note()
    table.use(rule)
    note()
    table.update(_ids([1, 2, 3]), _grads([1, 2, 3], 0), rule)
    table.use(rule)
    table.evict()
    note()
    table.put(_ids([4, 5, 6]), _grads([4, 5, 6], 1), {}, None)
    note()
    assert table.evict() > 0  # rows that were pulled until now
    note()
    table.use(None)
    note()
    assert lineages == [100, 101, 101, 102, 103, 104]
    other = RowTable(table.table, lineage=7)
    other.restore(table.rest())  # a standby
    assert other.at == table.at
    other.restore({name: part for name, part in table.rest().items() if name != "lineage"})  # a checkpoint
    assert other.at.lineage != table.at.lineage
    assert other.at.number == table.at.number


def test_nothing_continues_a_table_without_a_lineage():
    table = RowTable(Table(dim=WIDTH))
    table.update(_ids([1]), _grads([1], 0), None)
    assert table.unknown(table.at)
    table.put(_ids([1]), _grads([1], 0), {}, None)
    assert table.unknown(table.at)


def page(*ids: int) -> Page:
    numbers = np.array(ids)
    rows = np.repeat(numbers[:, None], 2, axis=1).astype(np.float32)
    return Page(numbers, rows, {"seen": numbers, "state.m": rows + 1})


def test_pages_of_several_servers_become_one_file_and_come_back() -> None:
    states = RowStates.of([page(5, 1), page(2)], 7)
    assert (states.ids.tolist(), list(states.parts)) == ([1, 2, 5], ["state.m"])
    array = {("w", "exp_avg"): torch.zeros(3)}
    file = array | {("t", name): value for name, value in states.tensors().items()}
    arrays, tables = split(file, "file")
    assert arrays == array
    assert tables["t"].steps == 7
    assert tables["t"].ids.tolist() == [1, 2, 5]
    assert tables["t"].parts["state.m"].tolist() == [[2, 2], [3, 3], [6, 6]]


def test_rows_that_are_there_take_their_states() -> None:
    states = RowStates.of([page(1, 5)], 7)
    there = Page(np.array([4, 5]), np.zeros((2, 2)), {"seen": np.array([40, 50]), "state.m": np.zeros((2, 2))})
    replaced, places = states.replacing(there)
    assert (replaced.ids.tolist(), places.tolist()) == ([5], [1])
    assert {name: part.tolist() for name, part in replaced.parts.items()} == {"seen": [50], "state.m": [[6, 6]]}
    nothing, places = RowStates.of([], 0).replacing(there)
    assert len(nothing.ids) == len(places) == 0


def test_states_that_rows_do_not_have() -> None:
    states = RowStates.of([page(1)], 7)
    states.require({"seen": PartSpec("int64", 0), "state.m": PartSpec("float32", 2)}, "t", "file")
    for parts in ({"state.m": PartSpec("float32", 3)}, {"state.m": PartSpec("float64", 2)}, {}):
        with pytest.raises(
            kv.UsageError, match=r"file holds m of 2 float32 for each row of table 't'.*keeps (m|nothing)"
        ):
            states.require(parts, "t", "file")


@pytest.mark.parametrize("name", ["rows.ids", "rows.steps", "rows.state.m"])
def test_a_file_that_is_damaged(name: str) -> None:
    tensors = RowStates.of([page(1, 5)], 7).tensors()
    tensors[name] = torch.zeros(3, 1)
    with pytest.raises(kv.UsageError, match="file is damaged: the states of table 't'"):
        split({("t", each): value for each, value in tensors.items()}, "file")
