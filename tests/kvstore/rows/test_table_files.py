"""Saved tables: frozen rows, their files, and tables that are opened without servers."""

from __future__ import annotations

import json
import os
import threading

import numpy as np
import pytest
from damage import ODD, changed, error_of, fields
from hypothesis import given, settings
from hypothesis import strategies as st
from row_rules import Momentum, has

import kvstore as kv
from kvstore.errors import CheckpointError, DeadlineExceeded, UsageError
from kvstore.lineage import Version
from kvstore.rows import saving
from kvstore.rows.foreign_files import export_parquet
from kvstore.rows.frozen_rows import Page
from kvstore.rows.open_table import open_table, require_known
from kvstore.rows.row_table import RowTable
from kvstore.rows.saving import FrozenReading, OpenSaves, SavePace, load_table, save_table
from kvstore.rows.table_files import FrozenState, base_of, folders, from_json, load_manifest, to_json, write_save
from kvstore.table import Capacity, MinCount, Table, Unseen

IDS = np.arange(-12, 13)


class Stripes:
    """A table on several servers, and a model of it: one table."""

    def __init__(self, table, count, lineage=1000):
        self.table, self.rule = table, Momentum()
        self.parts = [RowTable(table, stripe, count, lineage=lineage) for stripe in range(count)]
        for part in self.parts:
            part.use(self.rule)

    def push(self, ids, number):
        grads = np.random.default_rng(number).standard_normal((len(ids), self.table.width)).astype(np.float32)
        for part, mine in self._mine(ids):
            part.update(np.array(ids, np.int64)[mine], grads[mine], self.rule)

    def pull(self, ids):
        out = np.empty((len(ids), self.table.width), np.float32)
        for part, mine in self._mine(ids):
            rows = np.empty((len(mine), self.table.width), np.float32)
            part.pull(np.array(ids, np.int64)[mine], rows)
            out[mine] = rows
        return out

    def _mine(self, ids):
        for part in self.parts:
            yield part, [at for at, number in enumerate(ids) if has(part, number)]

    def save(self, directory, since=None, state=True, page=5):
        base = None if since is None else base_of(directory, since, "t", self.table, len(self.parts))
        versions = [None] * len(self.parts) if base is None else base.manifest.versions
        frozen = [part.freeze(since=version) for part, version in zip(self.parts, versions, strict=True)]
        described = FrozenState(
            versions=[each.at for each in frozen],
            steps=[each.steps for each in frozen],
            parts=self.parts[0].parts if state else {},
            rule=self.rule.rule if state else None,
        )
        pages = (each.page(at, page, state) for each in frozen for at in range(0, each.slots, page))
        gone = (each.gone_page(at, page) for each in frozen for at in range(0, each.gone, page))
        return write_save(directory, "t", self.table, described, pages, gone, base)

    def load(self, opened):
        require_known(opened, "t", self.table)
        for page in opened.pages(3):
            for part, mine in self._mine(page.ids.tolist()):
                parts = {name: values[mine] for name, values in page.parts.items()}
                part.put(page.ids[mine], page.rows[mine], parts, opened.version, max(opened.manifest.steps))


def saved(directory, **options):
    stripes = Stripes(Table(dim=2, init="uniform"), 2)
    stripes.push([1, 2, 3, -4], 0)
    stripes.save(directory, **options)
    return stripes


# ---- frozen rows


def _push(table, rule, ids, number):
    grads = np.random.default_rng(number).standard_normal((len(ids), 2)).astype(np.float32)
    table.update(np.array(ids, np.int64), grads, rule)


def _content(pages):
    return {
        number: (row.tobytes(), *(value.tobytes() for value in parts))
        for page in pages
        for number, row, *parts in zip(page.ids.tolist(), page.rows, *page.parts.values(), strict=True)
    }


PUSH = st.sets(st.integers(0, 20), max_size=9).map(sorted)


@settings(max_examples=25)
@given(st.lists(PUSH, max_size=6), st.lists(PUSH, max_size=12), st.integers(1, 6), st.booleans())
def test_pages_show_the_table_as_it_was_while_rows_change_go_and_come(before, during, count, grows):
    table = RowTable(Table(dim=2, evict=Capacity(8)) if grows else Table(shape=(21, 2), init="normal"))
    rule = Momentum()
    table.use(rule)
    for number, ids in enumerate(before):
        _push(table, rule, ids, number)
    at_once = table.freeze()
    want = _content([at_once.page(0, 999)])
    at_once.thaw()
    frozen, pages, number = table.freeze(), [], 100
    for start in range(0, frozen.slots, count):
        pages.append(frozen.page(start, count))
        if during:
            _push(table, rule, during.pop(), number)
            number += 1
            again = frozen.page(start, count)
            assert _content([again]) == _content(pages[-1:])
    assert frozen.rows == len(want)
    assert sum(len(page.ids) for page in pages) == len(want)
    assert frozen.version == frozen.steps == len(before)
    assert _content(pages) == want


@settings(max_examples=25)
@given(st.lists(PUSH, max_size=5), st.lists(PUSH, max_size=5))
def test_what_has_changed_since_a_version_makes_the_old_table_the_new_one(before, after):
    table = RowTable(Table(dim=2, evict=Capacity(8)), lineage=7)
    for number, ids in enumerate(before):
        _push(table, None, ids, number)
    content = _content([table.freeze().page(0, 999)])
    for number, ids in enumerate(after, 50):
        _push(table, None, ids, number)
    changes = table.freeze(since=Version(7, len(before)))
    for number in changes.gone_page(0, 999).tolist():
        content.pop(number, None)
    content |= _content([changes.page(0, 999)])
    assert content == _content([table.freeze().page(0, 999)])


def test_states_are_left_out_on_request():
    table, rule = RowTable(Table(dim=2)), Momentum()
    table.use(rule)
    _push(table, rule, [1], 0)
    assert table.freeze().page(0, 1, state=False).parts == {}


def test_states_stay_when_the_optimizer_changes_meanwhile():
    table, rule = RowTable(Table(dim=2)), Momentum()
    table.use(rule)
    _push(table, rule, [1, 2], 0)
    frozen = table.freeze()
    want = _content([table.freeze().page(0, 999)])
    table.use(None)
    _push(table, None, [1, 2], 1)
    assert _content([frozen.page(0, 999)]) == want


def test_pages_that_have_been_passed_cannot_be_read():
    table = RowTable(Table(dim=2))
    _push(table, None, range(9), 0)
    frozen = table.freeze()
    for start in (0, 3, 6):
        frozen.page(start, 3)
    with pytest.raises(UsageError, match="pages from 3 on"):
        frozen.page(0, 3)
    frozen.thaw()
    with pytest.raises(UsageError, match="thawed"):
        frozen.page(6, 3)
    frozen.thaw()
    assert table.statistics()["bytes"] < 9 * 16 + 64 * 4 + 9 * 8 + 1


def test_what_is_not_known_any_more_is_an_error():
    table = RowTable(Table(dim=2), lineage=7)
    _push(table, None, [1], 0)
    table.put(np.array([2]), np.ones((1, 2), np.float32), {}, version=None)
    with pytest.raises(UsageError, match="save the whole table"):
        table.freeze(since=Version(7, 1))
    with pytest.raises(UsageError, match="is at 1"):
        table.freeze(since=Version(table.lineage, 5))


# ---- saved tables: what is read is what was frozen, over any number of servers, and after any fault


PUSHES = st.lists(st.sets(st.integers(-12, 12), max_size=10).map(sorted), max_size=5)


@settings(max_examples=8)
@given(st.lists(PUSHES, min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_a_chain_of_saves_is_the_table_and_goes_on_on_other_servers(tmp_path_factory, rounds, servers, others, admits):
    directory = tmp_path_factory.mktemp("table")
    rules = {"admit": MinCount(2)} if admits else {"evict": Unseen(2)}
    stripes, since = Stripes(Table(dim=2, init="normal", **rules), servers), None
    for number, pushes in enumerate(rounds):
        for each, ids in enumerate(pushes):
            stripes.push(ids, 10 * number + each)
        since = stripes.save(directory, since).manifest.version
        opened = open_table(directory, verify=True)
        assert np.array_equal(opened.lookup(IDS).numpy(), stripes.pull(IDS))
        assert len(opened) == sum(part.statistics()["rows"] for part in stripes.parts)
        assert opened.version == since
    loaded = Stripes(stripes.table, others)
    loaded.load(opened)
    assert opened.has(IDS).sum() == len(opened) == sum(map(len, loaded.parts))
    ids = [number for number, has in zip(IDS.tolist(), opened.has(IDS), strict=True) if has]
    for each in (stripes, loaded):
        each.push(ids, 99)
    assert np.array_equal(loaded.pull(IDS), stripes.pull(IDS))


def test_without_states_a_save_has_none(tmp_path):
    saved(tmp_path, state=False)
    opened = open_table(tmp_path)
    assert opened.manifest.rule is None
    assert [page.parts for page in opened.pages()] == [{}]


def test_a_save_that_fails_leaves_the_last_one_and_nothing_of_its_own(tmp_path):
    stripes = saved(tmp_path)
    before = stripes.pull(IDS)

    def broken():
        yield stripes.parts[0].freeze().page(0, 9)
        raise RuntimeError("lost")

    state = FrozenState([Version(7, 2)] * 2, [2, 2], stripes.parts[0].parts)
    with pytest.raises(RuntimeError, match="lost"):
        write_save(tmp_path, "t", stripes.table, state, broken())
    assert os.listdir(tmp_path) == ["save-00000001"]  # noqa: PTH208
    assert np.array_equal(open_table(tmp_path).lookup(IDS).numpy(), before)


def test_a_save_without_a_manifest_is_none_and_its_number_is_not_used_again(tmp_path):
    stripes = saved(tmp_path)
    stripes.push([9], 1)
    (stripes.save(tmp_path).folder / "manifest.json").unlink()
    assert [folder.name for folder in folders(tmp_path)] == ["save-00000001"]
    assert open_table(tmp_path).version == 1
    assert stripes.save(tmp_path).folder.name == "save-00000003"
    with pytest.raises(CheckpointError, match="no saved table"):
        open_table(tmp_path / "other")


def test_pages_that_bring_a_row_twice_or_are_of_another_table_are_refused(tmp_path):
    stripes = saved(tmp_path)
    state = FrozenState([Version(7, 1)] * 2, [1, 1], stripes.parts[0].parts)
    page = stripes.parts[0].freeze().page(0, 9)
    with pytest.raises(UsageError, match="came twice"):
        write_save(tmp_path, "t", stripes.table, state, [page, page])
    with pytest.raises(UsageError, match="not of a table"):
        write_save(tmp_path, "t", Table(dim=3), state, [page])
    wrong = page._replace(parts={**page.parts, "seen": page.parts["seen"].astype(np.int32)})
    with pytest.raises(UsageError, match="'seen' of a page"):
        write_save(tmp_path, "t", stripes.table, state, [wrong])
    assert len(folders(tmp_path)) == 1


def test_a_delta_needs_a_save_of_that_version_of_this_table_on_as_many_servers(tmp_path):
    stripes = saved(tmp_path)
    with pytest.raises(UsageError, match=r"no save of version 7; those there are of \[1\]"):
        base_of(tmp_path, 7, "t", stripes.table, 2)
    with pytest.raises(UsageError, match="saved by 2 servers, and these are 3"):
        base_of(tmp_path, 1, "t", stripes.table, 3)
    with pytest.raises(UsageError, match="not of key 'u'"):
        base_of(tmp_path, 1, "u", stripes.table, 2)
    with pytest.raises(UsageError, match="none at all"):
        base_of(tmp_path / "none", 1, "t", stripes.table, 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "kvstore table 2"),
        ("rows", -1),
        ("rows", 5),
        ("rows", True),
        ("versions", []),
        ("lineages", [1]),
        ("lineages", [1, -1]),
        ("parts", {"../seen": ["int64", 0]}),
        ("parts", {"seen": ["object", 0]}),
        ("parts", {"rows": ["int64", 0]}),
        ("files", []),
        ("base", {"folder": "../../etc", "sha256": "0" * 64}),
        ("table", {}),
        ("rule", 3),
        ("key", ""),
    ],
)
def test_a_manifest_that_cannot_be_right_is_refused(tmp_path, field, value):
    saved(tmp_path)
    path = tmp_path / "save-00000001" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(CheckpointError, match=r"manifest\.json: damaged"):
        open_table(tmp_path)


def test_a_file_outside_of_the_folder_is_not_read(tmp_path):
    saved(tmp_path)
    path = tmp_path / "save-00000001" / "manifest.json"
    path.write_text(path.read_text().replace('"rows.float32"', '"../rows.float32"'))
    with pytest.raises(CheckpointError, match="damaged"):
        open_table(tmp_path)


def test_a_manifest_comes_back_as_it_was(tmp_path):
    saved(tmp_path)
    manifest, _ = load_manifest(tmp_path / "save-00000001")
    assert from_json(to_json(manifest)) == manifest
    nbytes = sum(file.nbytes for file in manifest.files)
    assert nbytes == sum(file.stat().st_size for file in tmp_path.glob("*/*") if file.suffix != ".json")


def test_a_manifest_of_very_many_bytes_is_not_read(tmp_path):
    (tmp_path / "manifest.json").write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(CheckpointError, match="at most"):
        load_manifest(tmp_path)


def test_each_field_damaged_is_refused_by_name_or_read(tmp_path):
    saved(tmp_path)
    path = tmp_path / "save-00000001" / "manifest.json"
    good = json.loads(path.read_text())
    texts = {json.dumps(changed(good, way, change)): None for way in fields(good) for change in ODD}
    accepted = [text for text in texts if error_of(lambda text=text: from_json(text)) is None]
    assert len(texts) > 500
    for text in accepted[:: max(1, len(accepted) // 40)]:
        path.write_text(text)
        error_of(lambda: open_table(tmp_path, verify=True))


TABLE = Table(dim=2)


def _page(number):
    return Page(np.array([number]), np.ones((1, 2), np.float32), {})


class _Reading:
    def __init__(self, pages):
        self._pages, self.closed = pages, False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True

    def pages(self, state):
        return iter(self._pages() if callable(self._pages) else self._pages)

    def gone_pages(self):
        return iter(())


def _save(directory, reading, wait, others=None):
    others = others or OpenSaves()
    return save_table(
        directory, "t", TABLE, 1, None, True, lambda _: (reading, FrozenState([Version(7, 3)], [3], {})), wait, others
    )


def test_a_save_in_a_thread_ends_when_it_is_waited_for_however_slow_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "SHARE", 1e-9)  # a pause of days
    go_on = threading.Event()

    def pages():
        go_on.wait(60)
        yield from map(_page, range(3))

    reading = _Reading(pages)
    ticket = _save(tmp_path, reading, wait=False)
    assert not ticket.done()
    with pytest.raises(DeadlineExceeded, match="save_table of 't' goes on"):
        ticket.wait(0)
    go_on.set()
    assert ticket.wait(60) == 3
    assert ticket.done()
    assert reading.closed
    assert len(open_table(tmp_path)) == 3


@pytest.mark.parametrize(("error", "raised"), [(UsageError("lost"), UsageError), (OSError(28, "full"), UsageError)])
@pytest.mark.parametrize("wait", [True, False])
def test_what_goes_wrong_is_raised_and_the_servers_may_go_on(tmp_path, error, raised, wait):
    def pages():
        yield _page(1)
        raise error

    reading = _Reading(pages)
    with pytest.raises(raised, match=r"lost|'t' cannot be saved there: full"):
        _save(tmp_path, reading, wait).wait(60)
    assert reading.closed
    with pytest.raises(CheckpointError, match="no saved table"):
        open_table(tmp_path)


def test_an_unforeseen_error_in_the_thread_is_not_lost(tmp_path):
    def pages():
        raise ZeroDivisionError("really")
        yield

    with pytest.raises(Exception, match="ZeroDivisionError: really"):
        _save(tmp_path, _Reading(pages), wait=False).wait(60)


def test_of_many_saves_the_oldest_is_ended_before_another_table_is_frozen(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "SHARE", 1e-9)
    others = OpenSaves()
    tickets = [_save(tmp_path, _Reading([_page(1), _page(2)]), False, others) for _ in range(5)]
    assert all(ticket.done() for ticket in tickets[:3])
    assert not any(ticket.done() for ticket in tickets[3:])
    assert [ticket.wait(60) for ticket in tickets] == [3] * 5
    assert len(folders(tmp_path)) == 5


def test_pages_pass_through_a_pace():
    pace = SavePace()
    pace.hurry()
    assert list(pace.pages(iter([1, 2]))) == [1, 2]


def test_a_load_gives_each_page_with_the_version(tmp_path):
    _save(tmp_path, _Reading([_page(1), _page(2)]), wait=True)
    got = []
    load_table(
        tmp_path, "t", TABLE, "sgd", lambda page, version, steps: got.append((page.ids.tolist(), version, steps))
    )
    assert got == [([1, 2], 3, 0)]


def test_a_directory_has_saves_of_one_table(tmp_path):
    store = kv.create("local")
    store.init(["a", "b"], [TABLE, TABLE])
    store.save_table("a", tmp_path).wait()
    with pytest.raises(UsageError, match="has saves of table 'a'; save 'b' to a directory of its own"):
        store.save_table("b", tmp_path)
    store.save_table("a", tmp_path).wait()
    assert open_table(tmp_path).key == "a"


# ---- saved tables, read without servers, whatever has become of the files


def test_rows_are_found_in_any_shape_and_what_has_none_begins_as_it_would(tmp_path):
    stripes = saved(tmp_path)
    opened = open_table(tmp_path)
    ids = np.array([[3, 77, 3], [-4, 1, 2]])
    assert opened.lookup(ids).shape == (2, 3, 2)
    assert np.array_equal(opened.lookup(ids).numpy().reshape(6, 2), stripes.pull(ids.reshape(-1)))
    assert opened.has(ids).tolist() == [[True, False, True], [True, True, True]]
    assert opened.lookup([]).shape == (0, 2)
    assert opened.key == "t"
    assert repr(opened) == f"<OpenTable 't' of float32[*, 2], version {opened.version}>"
    with pytest.raises(UsageError, match="ids of table 't'"):
        opened.lookup([0.5])


def test_a_fixed_table_is_saved_without_the_rows_that_nobody_pushed(tmp_path):
    stripes = Stripes(Table(shape=(25, 2), init="normal"), 3)
    stripes.push([3, 9], 0)
    stripes.save(tmp_path)
    opened = open_table(tmp_path)
    assert len(opened) == 2
    assert np.array_equal(opened.lookup(range(25)).numpy(), stripes.pull(range(25)))
    with pytest.raises(UsageError, match="id 25 at position 0"):
        opened.lookup([25])


def test_a_delta_whose_base_was_replaced_is_not_opened(tmp_path):
    stripes = saved(tmp_path)
    stripes.push([2], 1)
    stripes.save(tmp_path, since=1)
    path = tmp_path / "save-00000001" / "manifest.json"
    path.write_text(path.read_text().replace('"rule": "momentum"', '"rule": "other"'))
    with pytest.raises(CheckpointError, match="not the save that"):
        open_table(tmp_path)
    assert open_table(tmp_path / "save-00000001").version == 1


@pytest.mark.parametrize("name", ["ids.int64", "rows.float32", "index.int32", "gone.int64", "state.moment.float32"])
def test_a_file_that_is_missing_short_or_changed_is_found(tmp_path, name):
    stripes = saved(tmp_path)
    stripes.push([1, 5], 1)
    stripes.parts[0].evict()
    folder = stripes.save(tmp_path).folder
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content + b"\0" * 8)
    with pytest.raises(CheckpointError, match=name):
        open_table(tmp_path)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match="missing"):
        open_table(tmp_path)
    if content:
        (folder / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        opened = open_table(tmp_path)
        with pytest.raises(CheckpointError, match=f"{name}: damaged"):
            opened.verify()


@pytest.mark.parametrize("seed", range(5))
def test_an_index_of_any_bytes_gives_rows_or_none_but_does_not_hang(tmp_path, seed):
    saved(tmp_path)
    path = tmp_path / "save-00000001" / "index.int32"
    noise = np.random.default_rng(seed).integers(-3, 9, path.stat().st_size // 4, np.int32)
    path.write_bytes((noise if seed else np.full_like(noise, 2)).tobytes())
    assert open_table(tmp_path).lookup(IDS).shape == (25, 2)


def test_only_a_table_of_the_same_kind_can_be_loaded(tmp_path):
    saved(tmp_path)
    opened = open_table(tmp_path)
    for other in (Table(dim=3), Table(shape=(9, 2)), Table(dim=2, dtype="float64")):
        with pytest.raises(UsageError, match="key 't' is"):
            require_known(opened, "t", other)


def test_a_delta_of_another_course_is_not_opened(tmp_path):
    stripes = saved(tmp_path)
    stripes.push([2], 1)
    stripes.save(tmp_path, since=1)
    path = tmp_path / "save-00000002" / "manifest.json"
    fields = json.loads(path.read_text())
    fields["lineages"] = [lineage + 1 for lineage in fields["lineages"]]
    path.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="of another course of the table"):
        open_table(tmp_path)


def save_as(rows, directory, since=None):
    def freeze(versions):
        frozen = rows.freeze(None if versions is None else versions[0])
        return FrozenReading([frozen]), FrozenState([frozen.at], [frozen.steps], rows.parts, "momentum")

    return save_table(directory, "t", rows.table, 1, since, True, freeze, True, OpenSaves()).result


def test_a_table_is_exported_with_its_states(tmp_path):
    try:  # the newest pyarrow refuses the oldest numpy
        from pyarrow import parquet
    except ImportError as exc:
        pytest.skip(f"needs pyarrow: pip install 'torch-kvstore[parquet]' ({exc})")
    rows, rule = RowTable(Table(dim=3, dtype="float64")), Momentum()
    rule.states["moment"] = rule.states["moment"]._replace(dtype="float64")
    rows.use(rule)
    rows.update(np.array([-5, 2**62]), np.ones((2, 3)), rule)
    save_as(rows, tmp_path / "table")
    rows.use(None)
    rows.update(np.array([7]), np.full((1, 3), 7.0), None)
    save_as(rows, tmp_path / "table")  # whole, for states have been dropped
    assert export_parquet(tmp_path / "table", tmp_path / "plain.parquet") == 3
    plain = parquet.read_table(tmp_path / "plain.parquet").to_pydict()
    opened = open_table(tmp_path / "table")
    assert sorted(plain["id"]) == [-5, 7, 2**62]
    assert plain["row"] == opened.lookup(plain["id"]).tolist()
    assert list(plain) == ["id", "row"]
    export_parquet(tmp_path / "table" / "save-00000001", tmp_path / "whole.parquet", state=True)
    whole = parquet.read_table(tmp_path / "whole.parquet").to_pydict()
    assert whole["seen"] == [2, 2]
    assert whole["state.moment"] == [[1.25] * 3] * 2


@pytest.mark.parametrize("row", [(2,), (2, 3)])
def test_a_table_with_a_shape_is_exported_whole(tmp_path, row):
    parquet = pytest.importorskip("pyarrow.parquet")
    rows, rule = RowTable(Table(shape=(5, *row), init="uniform", scale=0.1)), Momentum()
    rows.use(rule)
    width = rows.table.width
    rows.update(np.array([1, 3]), np.arange(2.0 * width, dtype=np.float32).reshape(2, width), rule)
    save_as(rows, tmp_path / "table")
    assert export_parquet(tmp_path / "table", tmp_path / "plain.parquet", state=True) == 5
    found = parquet.read_table(tmp_path / "plain.parquet").to_pydict()
    assert sorted(found["id"]) == list(range(5))
    expected = open_table(tmp_path / "table").lookup(found["id"])
    assert np.array_equal(np.array(found["row"], np.float32).reshape(5, *row), expected)
    states = dict(zip(found["id"], found["state.moment"], strict=True))
    assert [number for number in states if states[number] is None] == [0, 2, 4]


def test_without_pyarrow_an_error_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"torch-kvstore\[parquet\]"):
        export_parquet(tmp_path, tmp_path / "x.parquet")


def test_an_open_table_follows_its_directory_and_opens_only_what_is_new(tmp_path):
    stripes = saved(tmp_path)
    opened = open_table(tmp_path)
    first = open_table(tmp_path / "save-00000001")
    assert not opened.update()
    for delta in range(1, 4):
        stripes.push([2, 50 + delta], delta)
        stripes.save(tmp_path, since=opened.version)
        for name in ("ids.int64", "rows.float32"):  # of all but the new save: they are mapped already
            (tmp_path / f"save-{delta:08}" / name).unlink()
        assert opened.wait_newer() == opened.version
        assert set(opened.changed.tolist()) == {2, 50 + delta}
        assert (opened.version, opened.manifest.base is None) == (delta + 1, False)
        assert np.array_equal(opened.lookup(IDS).numpy(), stripes.pull(IDS))
        assert opened.has([50 + delta, 54]).tolist() == [True, False]
        assert not opened.update()
    stripes.save(tmp_path)  # whole
    assert opened.update()
    assert opened.manifest.base is None
    assert opened.changed is None
    assert np.array_equal(opened.lookup(IDS).numpy(), stripes.pull(IDS))
    with pytest.raises(DeadlineExceeded, match="no save after version"):
        opened.wait_newer(0.0)
    assert not first.update(), "one save by itself stays as it is"


def test_a_table_that_cannot_be_updated_stays_as_it_was(tmp_path):
    stripes = saved(tmp_path)
    opened = open_table(tmp_path)
    before = opened.lookup(IDS)
    stripes.push([2], 1)
    folder = stripes.save(tmp_path, since=1).folder
    rows = (folder / "rows.float32").rename(folder / "rows")
    with pytest.raises(CheckpointError, match="missing"):
        opened.update()
    assert opened.version == 1
    assert opened.lookup(IDS).equal(before)
    rows.rename(folder / "rows.float32")
    assert opened.update()
    other = Stripes(Table(shape=(25, 2), init="normal"), 3)
    other.push([3, 9], 0)
    other.save(tmp_path)
    with pytest.raises(CheckpointError, match="open it by itself"):
        opened.update()
    assert np.array_equal(opened.lookup(IDS).numpy(), stripes.pull(IDS))
