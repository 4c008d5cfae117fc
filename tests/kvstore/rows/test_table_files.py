"""Saved tables: what is read is what was frozen, over any number of servers, and after any fault."""

import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from row_rules import Momentum

from kvstore.errors import CheckpointError, UsageError
from kvstore.rows.open_table import open_table, require_known
from kvstore.rows.row_table import RowTable
from kvstore.rows.table_files import TableState, base_of, folders, write_save
from kvstore.table import MinCount, Table, Unseen

IDS = np.arange(-12, 13)


class _Stripes:
    """A table on several servers, and a model of it: one table."""

    def __init__(self, table, count):
        self.table, self.rule = table, Momentum()
        self.parts = [RowTable(table, stripe, count) for stripe in range(count)]
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
            yield part, [at for at, number in enumerate(ids) if _of(part, number)]

    def save(self, directory, since=None, state=True, page=5):
        base = None if since is None else base_of(directory, since, "t", self.table, len(self.parts))
        versions = [None] * len(self.parts) if base is None else base.manifest.versions
        frozen = [part.freeze(since=version) for part, version in zip(self.parts, versions, strict=True)]
        described = TableState(
            versions=[each.version for each in frozen],
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


def _of(part, number):
    try:
        part.require(np.array([number]))
    except UsageError:
        return False
    return True


PUSHES = st.lists(st.sets(st.integers(-12, 12), max_size=10).map(sorted), max_size=5)


@settings(max_examples=8)
@given(st.lists(PUSHES, min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_a_chain_of_saves_is_the_table_and_goes_on_on_other_servers(tmp_path_factory, rounds, servers, others, admits):
    directory = tmp_path_factory.mktemp("table")
    rules = {"admit": MinCount(2)} if admits else {"evict": Unseen(2)}
    stripes, since = _Stripes(Table(dim=2, init="normal", **rules), servers), None
    for number, pushes in enumerate(rounds):
        for each, ids in enumerate(pushes):
            stripes.push(ids, 10 * number + each)
        since = stripes.save(directory, since).manifest.version
        opened = open_table(directory, verify=True)
        assert np.array_equal(opened.lookup(IDS).numpy(), stripes.pull(IDS))
        assert len(opened) == sum(part.statistics()["rows"] for part in stripes.parts)
        assert opened.version == since
    loaded = _Stripes(stripes.table, others)
    loaded.load(opened)
    assert opened.has(IDS).sum() == len(opened) == sum(map(len, loaded.parts))
    ids = [number for number, has in zip(IDS.tolist(), opened.has(IDS), strict=True) if has]
    for each in (stripes, loaded):
        each.push(ids, 99)
    assert np.array_equal(loaded.pull(IDS), stripes.pull(IDS))


def _saved(directory, **options):
    stripes = _Stripes(Table(dim=2, init="uniform"), 2)
    stripes.push([1, 2, 3, -4], 0)
    stripes.save(directory, **options)
    return stripes


def test_rows_are_found_in_any_shape_and_what_has_none_begins_as_it_would(tmp_path):
    stripes = _saved(tmp_path)
    opened = open_table(tmp_path)
    ids = np.array([[3, 77, 3], [-4, 1, 2]])
    assert opened.lookup(ids).shape == (2, 3, 2)
    assert np.array_equal(opened.lookup(ids).numpy().reshape(6, 2), stripes.pull(ids.reshape(-1)))
    assert opened.has(ids).tolist() == [[True, False, True], [True, True, True]]
    assert opened.lookup([]).shape == (0, 2)
    assert opened.key == "t"
    with pytest.raises(UsageError, match="ids of table 't'"):
        opened.lookup([0.5])


def test_a_fixed_table_is_saved_without_the_rows_that_nobody_pushed(tmp_path):
    stripes = _Stripes(Table(shape=(25, 2), init="normal"), 3)
    stripes.push([3, 9], 0)
    stripes.save(tmp_path)
    opened = open_table(tmp_path)
    assert len(opened) == 2
    assert np.array_equal(opened.lookup(range(25)).numpy(), stripes.pull(range(25)))
    with pytest.raises(UsageError, match="id 25 at position 0"):
        opened.lookup([25])


def test_without_states_a_save_has_none(tmp_path):
    _saved(tmp_path, state=False)
    opened = open_table(tmp_path)
    assert opened.manifest.rule is None
    assert [page.parts for page in opened.pages()] == [{}]


def test_a_save_that_fails_leaves_the_last_one_and_nothing_of_its_own(tmp_path):
    stripes = _saved(tmp_path)
    before = stripes.pull(IDS)

    def broken():
        yield stripes.parts[0].freeze().page(0, 9)
        raise RuntimeError("lost")

    state = TableState([2, 2], [2, 2], stripes.parts[0].parts)
    with pytest.raises(RuntimeError, match="lost"):
        write_save(tmp_path, "t", stripes.table, state, broken())
    assert os.listdir(tmp_path) == ["save-00000001"]  # noqa: PTH208
    assert np.array_equal(open_table(tmp_path).lookup(IDS).numpy(), before)


def test_a_save_without_a_manifest_is_none_and_its_number_is_not_used_again(tmp_path):
    stripes = _saved(tmp_path)
    stripes.push([9], 1)
    (stripes.save(tmp_path).folder / "manifest.json").unlink()
    assert [folder.name for folder in folders(tmp_path)] == ["save-00000001"]
    assert open_table(tmp_path).version == 1
    assert stripes.save(tmp_path).folder.name == "save-00000003"
    with pytest.raises(CheckpointError, match="no saved table"):
        open_table(tmp_path / "other")


def test_pages_that_bring_a_row_twice_or_are_of_another_table_are_refused(tmp_path):
    stripes = _saved(tmp_path)
    state = TableState([1, 1], [1, 1], stripes.parts[0].parts)
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
    stripes = _saved(tmp_path)
    with pytest.raises(UsageError, match=r"no save of version 7; those there are of \[1\]"):
        base_of(tmp_path, 7, "t", stripes.table, 2)
    with pytest.raises(UsageError, match="saved by 2 servers, and these are 3"):
        base_of(tmp_path, 1, "t", stripes.table, 3)
    with pytest.raises(UsageError, match="not of key 'u'"):
        base_of(tmp_path, 1, "u", stripes.table, 2)
    with pytest.raises(UsageError, match="none at all"):
        base_of(tmp_path / "none", 1, "t", stripes.table, 2)


def test_a_delta_whose_base_was_replaced_is_not_opened(tmp_path):
    stripes = _saved(tmp_path)
    stripes.push([2], 1)
    stripes.save(tmp_path, since=1)
    path = tmp_path / "save-00000001" / "manifest.json"
    path.write_text(path.read_text().replace('"rule": "momentum"', '"rule": "other"'))
    with pytest.raises(CheckpointError, match="not the save that"):
        open_table(tmp_path)
    assert open_table(tmp_path / "save-00000001").version == 1


@pytest.mark.parametrize("name", ["ids.int64", "rows.float32", "index.int32", "gone.int64", "state.moment.float32"])
def test_a_file_that_is_missing_short_or_changed_is_found(tmp_path, name):
    stripes = _saved(tmp_path)
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
    _saved(tmp_path)
    path = tmp_path / "save-00000001" / "index.int32"
    noise = np.random.default_rng(seed).integers(-3, 9, path.stat().st_size // 4, np.int32)
    path.write_bytes((noise if seed else np.full_like(noise, 2)).tobytes())
    assert open_table(tmp_path).lookup(IDS).shape == (25, 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "kvstore table 2"),
        ("rows", -1),
        ("rows", 5),
        ("rows", True),
        ("versions", []),
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
    _saved(tmp_path)
    path = tmp_path / "save-00000001" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(CheckpointError, match=r"manifest\.json: damaged"):
        open_table(tmp_path)


def test_a_file_outside_of_the_folder_is_not_read(tmp_path):
    _saved(tmp_path)
    path = tmp_path / "save-00000001" / "manifest.json"
    path.write_text(path.read_text().replace('"rows.float32"', '"../rows.float32"'))
    with pytest.raises(CheckpointError, match="damaged"):
        open_table(tmp_path)


def test_only_a_table_of_the_same_kind_can_be_loaded(tmp_path):
    _saved(tmp_path)
    opened = open_table(tmp_path)
    for other in (Table(dim=3), Table(shape=(9, 2)), Table(dim=2, dtype="float64")):
        with pytest.raises(UsageError, match="key 't' is"):
            require_known(opened, "t", other)
