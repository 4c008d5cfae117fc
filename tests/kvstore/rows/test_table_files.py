"""Saved tables: what is read is what was frozen, over any number of servers, and after any fault."""

import json
import os

import numpy as np
import pytest
from damage import ODD, changed, error_of, fields
from hypothesis import given, settings
from hypothesis import strategies as st
from saved_stripes import IDS, Stripes, saved

from kvstore.errors import CheckpointError, UsageError
from kvstore.lineage import Version
from kvstore.rows.open_table import open_table
from kvstore.rows.table_files import FrozenState, base_of, folders, from_json, load_manifest, to_json, write_save
from kvstore.table import MinCount, Table, Unseen

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
    assert manifest.nbytes == sum(file.stat().st_size for file in tmp_path.glob("*/*") if file.suffix != ".json")


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
