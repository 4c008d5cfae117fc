"""A table against what a dict does; how its rows lie, and which are admitted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from row_rules import WIDTH, Momentum, grads_of, has, ids_of, pulled

import kvstore as kv
from kvstore.errors import UsageError, WireError
from kvstore.rows import admission
from kvstore.rows.admission import AdmissionRule, CountedIds, EvictionRule, GoneIds, write_beginnings
from kvstore.rows.frozen_rows import Page
from kvstore.rows.halves import narrowed, widened
from kvstore.rows.ids import mixed
from kvstore.rows.layout import part_bytes, read_rows, write_rows
from kvstore.rows.row_table import RowStates, RowTable, split
from kvstore.rows.stripe import PartSpec
from kvstore.table import CODECS, DTYPES, Capacity, MinCount, Probability, Table, Unseen

# ---- a table against what a dict does


IDS = st.integers(-6, 9) | st.sampled_from([2**63 - 1, -(2**63)])
PUSHES = st.lists(st.sets(IDS, max_size=8).map(sorted), max_size=14)


def _beginnings(table, ids):
    out = np.empty((len(ids), WIDTH), np.float32)
    write_beginnings(table, ids_of(ids), out)
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
        changed = table.update(ids_of(ids), grads_of(ids, number), rule)
        model.update(ids, grads_of(ids, number))
        assert changed.tolist() == [n for n in ids if n in model.rows]
        assert np.array_equal(pulled(table, wanted), model.pull(wanted))
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
        grads = grads_of(ids, number)
        whole.update(ids_of(ids), grads.copy(), None)
        for part in parts:
            mine = [at for at, n in enumerate(ids) if has(part, n)]
            part.update(ids_of(ids)[mine], grads[mine], None)
    everything = [n for n in range(-6, 10) if grows or 0 <= n < 10]
    for part in parts:
        mine = [n for n in everything if has(part, n)]
        assert np.array_equal(pulled(part, mine), pulled(whole, mine))
    assert sum(map(len, parts)) == len(whole)


def test_a_table_with_a_shape_begins_as_its_seed_says_and_holds_what_is_assigned():
    described = Table(shape=(5, WIDTH), init="uniform", seed=2)
    table = RowTable(described)
    assert np.array_equal(pulled(table, [4, 0, 4]), _beginnings(described, [4, 0, 4]))
    assert len(table) == 0
    table.update(ids_of([1, 4]), np.ones((2, WIDTH), np.float32), None)
    assert np.array_equal(pulled(table, [1, 4]), np.ones((2, WIDTH)))
    assert np.array_equal(pulled(table, [0]), _beginnings(described, [0]))


def test_a_rule_that_is_not_lazy_updates_all_rows_of_a_fixed_table():
    rule = Momentum(lazy=False)
    table, model = RowTable(Table(shape=(7, WIDTH), init="normal"), 1, 2), []
    table.use(rule)
    rows = torch.from_numpy(_beginnings(table.table, [1, 3, 5]))
    moments = torch.full((3, WIDTH), 0.5)
    for number, ids in enumerate([[5], [1, 3], []]):
        grads = grads_of(ids, number)
        whole = torch.zeros(3, WIDTH)
        whole[[n // 2 for n in ids]] = torch.from_numpy(grads)
        moments = moments * 0.5 + whole
        rows = rows - moments
        model.append(table.update(ids_of(ids), grads, rule).tolist())
        assert np.array_equal(pulled(table, [1, 3, 5]), rows.numpy())
    assert model == [[1, 3, 5]] * 3
    with pytest.raises(UsageError, match="lazy_update=True"):
        RowTable(Table(dim=WIDTH)).update(ids_of([1]), grads_of([1], 0), rule)


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
    table.update(ids_of([1]), grads_of([1], 0), rule)
    before = pulled(table, [1, 2])
    with pytest.raises(RuntimeError):
        table.update(ids_of([1, 2]), np.ones((2, WIDTH + 1), np.float32), rule)
    assert np.array_equal(pulled(table, [1, 2]), before)
    assert (table.version, len(table)) == (1, 1)


def test_a_copy_goes_on_as_the_table_does():
    described = Table(dim=WIDTH, admit=MinCount(3), evict=[Unseen(4), Capacity(9, "count")], init="normal")
    table, rule, rng = RowTable(described), Momentum(), np.random.default_rng(0)
    table.use(rule)

    def push(number, *tables):
        ids = np.unique(rng.integers(0, 25, 8))
        return [each.update(ids, grads_of(ids, number), rule).tolist() for each in tables]

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
        assert np.array_equal(pulled(table, range(25)), pulled(copy, range(25)))
    assert table.statistics()["rows"] == copy.statistics()["rows"] > 0
    with pytest.raises(UsageError, match="admission"):
        RowTable(Table(dim=WIDTH)).restore(table.rest())


@pytest.mark.parametrize(("ids", "wrong"), [([1, 3, 9], "id 9 at position 2"), ([-1], "id -1"), ([1, 2], "id 2 at")])
def test_ids_of_others_are_refused(ids, wrong):
    with pytest.raises(UsageError, match=wrong):
        RowTable(Table(shape=(9, 2)), 1, 2).require(ids_of(ids))


def test_a_lineage_goes_on_with_updates_and_ends_with_what_no_version_counts():
    table, rule = RowTable(Table(dim=WIDTH, evict=Capacity(4)), lineage=100), Momentum()
    lineages = []

    def note():
        lineages.append(table.at.lineage)

    note()
    table.use(rule)
    note()
    table.update(ids_of([1, 2, 3]), grads_of([1, 2, 3], 0), rule)
    table.use(rule)
    table.evict()
    note()
    table.put(ids_of([4, 5, 6]), grads_of([4, 5, 6], 1), {}, None)
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
    table.update(ids_of([1]), grads_of([1], 0), None)
    assert table.unknown(table.at)
    table.put(ids_of([1]), grads_of([1], 0), {}, None)
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


# ---- layout


SHAPES = st.tuples(st.integers(0, 9), st.integers(1, 9))


def _through(rows, codec, dtype="float32"):
    count, width = rows.shape
    part = bytearray(part_bytes(count, width, dtype, codec))
    write_rows(rows, codec, memoryview(part))
    return read_rows(bytes(part), count, width, dtype, codec)


@given(SHAPES, st.sampled_from(DTYPES), st.sampled_from(CODECS), st.integers(0, 9), st.integers(-30, 30))
def test_rows_come_back_as_near_as_the_codec_is(shape, dtype, codec, seed, exponent):
    wide = (np.random.default_rng(seed).standard_normal(shape) * 2.0**exponent).clip(-60000, 60000)
    rows = narrowed(wide, dtype)
    before = rows.copy()
    got = _through(rows, codec, dtype)
    assert got.shape == shape
    assert got.dtype == rows.dtype
    assert part_bytes(*shape, dtype, codec) % 16 == 0
    assert np.array_equal(rows, before)
    rows, got = widened(rows), widened(got)
    greatest = np.abs(rows).max(axis=1, keepdims=True, initial=0)
    error = np.abs(got - rows)
    rounded = {"float16": np.abs(got) * 2.0**-11 + 2.0**-25, "bfloat16": np.abs(got) * 2.0**-8}.get(dtype, 0)
    tolerance = {
        "none": 0,
        "fp16": np.abs(rows) * 2.0**-11 + 2.0**-25,
        "bf16": np.abs(rows) * 2.0**-8,
        "int8": greatest / 253 + 1e-37,
    }
    assert (error <= tolerance[codec] + (rounded if codec != "none" else 0)).all()


def test_halves_are_torchs():
    rows = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    assert np.array_equal(_through(rows, "fp16"), torch.from_numpy(rows).half().float().numpy())
    assert np.array_equal(_through(rows, "bf16"), torch.from_numpy(rows).bfloat16().float().numpy())


def test_halves_clip_what_is_too_large_and_keep_what_is_infinite():
    rows = np.array([[1e9, -1e9, np.inf, -np.inf, np.nan, 1.0]], np.float32)
    assert np.array_equal(_through(rows, "fp16"), [[65504, -65504, np.inf, -np.inf, np.nan, 1]], equal_nan=True)


def test_int8_keeps_the_greatest_zeros_and_says_what_is_broken():
    rows = np.array([[127, -127, 1], [0, 0, 0], [1, np.inf, 2], [np.nan, 1, 2], [1e-44, 0, 0]], np.float32)
    got = _through(rows, "int8")
    assert got[0].tolist() == [127, -127, 1]
    assert got[1].tolist() == got[4].tolist() == [0, 0, 0]
    assert np.isnan(got[2:4]).all()


def test_rows_that_may_only_be_read_can_be_written():
    rows = np.ones((2, 3), np.float32)
    rows.flags.writeable = False
    for codec in CODECS:
        assert np.array_equal(_through(rows, codec), rows)


@pytest.mark.parametrize("codec", CODECS)
def test_a_part_of_another_length_is_refused(codec):
    part = bytes(part_bytes(3, 5, "float32", codec))
    for wrong in (part[:-1], part + b"\0", b""):
        with pytest.raises(WireError, match="3 rows of 5 float32"):
            read_rows(wrong, 3, 5, "float32", codec)


# ---- admission


@settings(max_examples=12)
@given(st.lists(st.sets(st.integers(-5, 20), max_size=8).map(sorted), max_size=15))
def test_pushes_are_counted_for_each_id(pushes):
    counted, counts = CountedIds(), {}
    for ids in pushes:
        for number in ids:
            counts[number] = counts.get(number, 0) + 1
        assert counted.add(np.array(ids, np.int64)).tolist() == [counts[number] for number in ids]


def test_an_id_is_forgotten_only_after_many_others():
    counted = CountedIds(most=10)
    counted.add(np.array([-1]))
    for number in range(9):
        counted.add(np.array([number]))
    assert counted.add(np.array([-1])).tolist() == [2]
    counted.add(np.arange(100, 125))
    assert counted.add(np.array([-1])).tolist() == [1]
    assert counted.nbytes < 5000


def test_an_id_with_a_row_is_forgotten_at_once():
    rule = AdmissionRule(Table(dim=1, admit=MinCount(2)))
    ids = np.array([3, 4])
    assert [rule.admit(ids, version).tolist() for version in (1, 2, 3)] == [[False] * 2, [True] * 2, [False] * 2]
    assert AdmissionRule(Table(dim=1)).admit(ids, 1).all()


def test_a_copy_counts_on():
    rule, copy = (AdmissionRule(Table(dim=1, admit=MinCount(3))) for _ in range(2))
    rule.admit(np.array([3, 4]), 1)
    copy.restore(rule.parts())
    for version in (2, 3):
        ids = np.array([4, 5])
        assert rule.admit(ids, version).tolist() == copy.admit(ids, version).tolist()
    with pytest.raises(UsageError, match="remembers"):
        copy.restore({})


def test_a_draw_depends_on_seed_id_and_update_alone():
    ids = np.arange(400)

    def drawn(seed, version):
        return AdmissionRule(Table(dim=1, admit=Probability(0.5), seed=seed)).admit(ids, version)

    assert np.array_equal(drawn(1, 1), drawn(1, 1))
    for other in (drawn(2, 1), drawn(1, 2)):
        assert 130 < np.count_nonzero(other != drawn(1, 1)) < 270
    assert AdmissionRule(Table(dim=1, admit=Probability(1))).admit(ids, 1).all()


def test_it_says_what_went_after_a_version():
    ids = GoneIds()
    for version in (1, 3, 3, 5):
        ids.add(np.array([version * 10, version * 10 + len(str(ids.nbytes))]), version, 0)
    assert ids.since(5).tolist() == []
    assert ids.since(3).tolist() == [50, 52]
    assert 10 in ids.since(0)


def test_the_oldest_are_forgotten_but_not_in_silence(monkeypatch):
    monkeypatch.setattr(admission, "KEPT", 4)
    ids = GoneIds()
    for version in range(1, 9):
        ids.add(np.array([version]), version, rows=0)
    assert ids.nbytes == 4 * 8
    assert ids.since(4).tolist() == [5, 6, 7, 8]
    with pytest.raises(UsageError, match="remembered since version 4 alone; save the whole table"):
        ids.since(3)
    ids.add(np.array([9]), 9, rows=100)
    assert ids.since(4).tolist() == [5, 6, 7, 8, 9]
    ids.forget(10)
    with pytest.raises(UsageError, match="since version 10"):
        ids.since(9)
    assert ids.since(10).tolist() == []


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=20), st.booleans(), st.data())
def test_those_go_that_come_first_by_count_age_and_hash(rows, by_count, data):
    counts, seen = map(np.array, zip(*rows, strict=True))
    ids = np.arange(len(rows)) - 5
    count = data.draw(st.integers(0, len(rows)))
    rule = EvictionRule(Table(dim=1, evict=Capacity(1, "count" if by_count else "age")), 0, 1)
    chosen = rule.chosen(count, ids, seen, counts if rule.by_count else None)
    order = np.lexsort((mixed(ids), seen, counts) if by_count else (mixed(ids), seen))
    assert sorted(chosen.tolist()) == sorted(order[:count].tolist())


def test_several_rules_are_as_tight_as_the_tightest_and_the_limit_is_parted_over_servers():
    table = Table(dim=1, evict=[Unseen(9), Capacity(100), Unseen(5), Capacity(41, "count")])
    rule = EvictionRule(table, 3, 4)
    assert (rule.rounds, rule.capacity, rule.by_count) == (5, 11, True)
    assert rule.oldest(7) == 2
    assert rule.surplus(11) == 0
    assert rule.surplus(13) == 2
    assert EvictionRule(Table(dim=1, evict=Capacity(160)), 0, 1).surplus(161) == 11
    assert EvictionRule(Table(dim=1), 0, 1).surplus(10**9) == 0


@given(st.integers(1, 100), st.integers(1, 9))
def test_what_all_stripes_may_have_is_what_the_table_may_have(rows, stripes):
    table = Table(dim=1, evict=Capacity(rows))
    parts = [EvictionRule(table, stripe, stripes).capacity for stripe in range(stripes)]
    assert sum(parts) == rows
    assert max(parts) - min(parts) <= 1


MASK = 2**64 - 1


def _mix(x):
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & MASK
    return x ^ (x >> 31)


def _element(table, number, column):
    h = _mix((number + table.seed * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) & MASK)
    h = _mix((h + (column + 1) * 0x9E3779B97F4A7C15) & MASK)
    if table.init == "uniform":
        return ((h >> 11) * 2.0**-52 - 1.0) * table.scale
    t = (sum(h >> shift & 0xFFFF for shift in (0, 16, 32, 48)) - 2 * 65535) / math.sqrt((65536**2 - 1) / 3)
    return (t + (t * t - 3.0) * t / 80.0) * table.scale


def _rows(table, ids):
    rows = np.empty((len(ids), table.width), table.dtype)
    write_beginnings(table, np.array(ids, np.int64), rows)
    return rows


@settings(max_examples=30)
@given(
    st.sampled_from(["uniform", "normal"]),
    st.integers(0, 2**63 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([1, 3]),
    st.floats(0.001, 10),
)
def test_each_element_is_the_function_of_seed_id_and_column_that_the_module_says(init, seed, number, width, scale):
    table = Table(dim=width, dtype="float64", init=init, seed=seed, scale=scale)
    assert _rows(table, [number]).tolist() == [[_element(table, number, column) for column in range(width)]]


def test_values_stay_what_they_are():
    assert _rows(Table(dim=3, init="uniform", seed=1), [5]).tolist() == UNIFORM
    assert _rows(Table(dim=3, init="normal", seed=1), [5]).tolist() == NORMAL


def test_zeros_and_constants():
    assert _rows(Table(dim=2, scale=3.0), [1, 2]).tolist() == [[0, 0], [0, 0]]
    assert _rows(Table(dim=2, init="constant", scale=3.0), [1]).tolist() == [[3, 3]]


@pytest.mark.parametrize("init", ["uniform", "normal"])
def test_a_row_does_not_depend_on_the_others(init):
    table = Table(dim=(7, 3), init=init)
    many = _rows(table, range(5000))
    assert np.array_equal(_rows(table, [4999, 0]), many[[4999, 0]])


def test_they_are_distributed_as_they_are_called():
    uniform = _rows(Table(dim=100, init="uniform", scale=2.0), range(1000))
    assert abs(uniform.mean()) < 0.02
    assert uniform.min() > -2
    assert uniform.max() < 2
    assert abs(uniform.std() - 2 / math.sqrt(3)) < 0.01
    normal = np.sort(_rows(Table(dim=100, init="normal"), range(1000)).ravel())
    for deviations in (-2, -1, 0, 1, 2):
        share = np.searchsorted(normal, deviations) / normal.size
        assert abs(share - 0.5 * (1 + math.erf(deviations / math.sqrt(2)))) < 0.006
    columns = _rows(Table(dim=50, init="normal"), range(2000))
    assert np.abs(np.corrcoef(columns.T) - np.eye(50)).max() < 0.12


UNIFORM = [[-0.23724409937858582, -0.5714535117149353, 0.49996817111968994]]
NORMAL = [[2.0103867053985596, 0.49389541149139404, 0.8772124648094177]]
