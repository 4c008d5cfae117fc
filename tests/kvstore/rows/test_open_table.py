"""Saved tables, read without servers, whatever has become of the files."""

import json

import numpy as np
import pytest
from row_rules import Momentum
from saved_stripes import IDS, Stripes, saved

from kvstore.errors import CheckpointError, UsageError
from kvstore.rows.open_table import export_parquet, open_table, require_known
from kvstore.rows.row_table import RowTable
from kvstore.rows.saving import FrozenReading, OpenSaves, save_table
from kvstore.rows.table_files import FrozenState
from kvstore.table import Table


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


def _save(rows, directory, since=None):
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
    _save(rows, tmp_path / "table")
    rows.use(None)
    rows.update(np.array([7]), np.full((1, 3), 7.0), None)
    _save(rows, tmp_path / "table")  # whole, for states have been dropped
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
    _save(rows, tmp_path / "table")
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
        assert opened.update()
        assert (opened.version, opened.manifest.base is None) == (delta + 1, False)
        assert np.array_equal(opened.lookup(IDS).numpy(), stripes.pull(IDS))
        assert opened.has([50 + delta, 54]).tolist() == [True, False]
        assert not opened.update()
    stripes.save(tmp_path)  # whole
    assert opened.update()
    assert opened.manifest.base is None
    assert np.array_equal(opened.lookup(IDS).numpy(), stripes.pull(IDS))
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
