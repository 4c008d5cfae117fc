"""Saved tables, read without servers, whatever has become of the files."""

import json

import numpy as np
import pytest
from saved_stripes import IDS, Stripes, saved

from kvstore.errors import CheckpointError, UsageError
from kvstore.rows.open_table import open_table, require_known
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
