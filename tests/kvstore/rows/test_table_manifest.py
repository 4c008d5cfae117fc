import json

import pytest
from damage import ODD, changed, error_of, fields
from saved_stripes import saved

from kvstore.errors import CheckpointError
from kvstore.rows.open_table import open_table
from kvstore.rows.table_manifest import from_json, load_manifest, to_json


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
