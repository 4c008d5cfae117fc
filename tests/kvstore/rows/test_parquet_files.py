"""Rows in Parquet files: with their names beside them, and back into tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvstore as kv

NAMES = ["ann", "bob", "eve"]


@pytest.fixture
def pyarrow() -> Any:
    try:  # the newest pyarrow refuses the oldest numpy
        import pyarrow
        import pyarrow.parquet
    except ImportError as exc:
        pytest.skip(f"needs pyarrow: pip install 'torch-kvstore[parquet]' ({exc})")
    return pyarrow


def saved(directory: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Save a table of three names and of an id that has none; return the rows of the names."""
    store = kv.create("local")
    store.init("user", kv.Table(dim=2, dtype=dtype))
    rows = torch.rand(4, 2).to(dtype)
    store.put_rows("user", kv.RowSparse([*kv.hash_ids(NAMES).tolist(), 5], rows))
    store.save_table("user", directory).wait()
    return rows[:3]


@pytest.mark.parametrize("kind", ["list", "array", "pyarrow", "chunks", "no rows", "no names"])
def test_names_stand_beside_their_rows(kind: str, pyarrow: Any, tmp_path: Path) -> None:
    rows = saved(tmp_path / "table")
    names: Any = ["zoe", *NAMES, "ann"]
    known = {"no rows": ["zoe"], "no names": []}.get(kind, names)
    given = {
        "array": lambda: np.array(names),
        "pyarrow": lambda: pyarrow.array(names),
        "chunks": lambda: pyarrow.chunked_array([names[:2], names[2:]]),
    }.get(kind, lambda: known)()
    assert kv.export_parquet(tmp_path / "table", tmp_path / "t.parquet", names=given) == 4
    found = pyarrow.parquet.read_table(tmp_path / "t.parquet").to_pydict()
    by_name = {name: row for name, row in zip(found["name"], found["row"], strict=True) if name is not None}
    assert by_name == ({} if kind.startswith("no") else dict(zip(NAMES, rows.tolist(), strict=True)))
    assert [name for name, number in zip(found["name"], found["id"], strict=True) if number == 5] == [None]


def test_rows_of_half_precision_are_written_as_float32(pyarrow: Any, tmp_path: Path) -> None:
    rows = saved(tmp_path / "table", torch.bfloat16)
    kv.export_parquet(tmp_path / "table", tmp_path / "t.parquet", names=NAMES)
    found = {
        int(each): row
        for part in kv.read_parquet(tmp_path / "t.parquet")
        for each, row in zip(part.ids, part.rows, strict=True)
    }
    for each, row in zip(kv.hash_ids(NAMES).tolist(), rows, strict=True):
        assert torch.equal(found[each], row.float())


def test_rows_come_back_into_a_table_by_id_and_by_name(pyarrow: Any, tmp_path: Path) -> None:
    rows = saved(tmp_path / "table")
    path = tmp_path / "t.parquet"
    kv.export_parquet(tmp_path / "table", path, names=NAMES)
    table = pyarrow.parquet.read_table(path)
    named = tmp_path / "named.parquet"
    pyarrow.parquet.write_table(table.filter(table["name"].is_valid()).drop_columns("id"), named)
    lists = tmp_path / "lists.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": kv.hash_ids(NAMES).numpy(), "row": rows.double().tolist()}), lists)
    for file, column in ((path, "id"), (named, "name"), (lists, "id")):
        store = kv.create("local")
        store.init("user", kv.Table(dim=2, dtype="float64" if file == lists else "float32"))
        parts = list(kv.read_parquet(file, id=column, count=2))
        assert max(len(part.ids) for part in parts) == 2
        for part in parts:
            store.put_rows("user", part)
        assert torch.equal(store.row_sparse_pull("user", row_ids=kv.hash_ids(NAMES)).float(), rows)


def test_what_are_no_rows_is_refused(pyarrow: Any, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    row = [[1.0, 2.0], [3.0, 4.0]]
    for columns, said in (
        ({"key": [1, 2], "row": row}, r"has no column 'id'; choose from \['key', 'row'\]"),
        ({"id": [1, None], "row": row}, "column 'id' has nulls"),
        ({"id": [1.0, 2.0], "row": row}, "not of pyarrow's double"),
        ({"id": [1, 2], "row": [1.0, 2.0]}, "column 'row' has no lists of numbers without nulls, but double"),
        ({"id": [1, 2], "row": [[1.0, None], [3.0, 4.0]]}, "column 'row' has no lists"),
        ({"id": [1, 2], "row": [None, [3.0, 4.0]]}, "column 'row' has no lists"),
        ({"id": [1, 2], "row": [[1.0], [3.0, 4.0]]}, "not as long as each other"),
    ):
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
        with pytest.raises(kv.UsageError, match=said):
            list(kv.read_parquet(path))
    path.write_bytes(path.read_bytes()[:-3])
    for file in (path, tmp_path / "none.parquet"):
        with pytest.raises(kv.CheckpointError, match=f"{file}: missing or damaged"):
            list(kv.read_parquet(file))
    saved(tmp_path / "table")
    with pytest.raises(kv.UsageError, match="at position 1 is None"):
        kv.export_parquet(tmp_path / "table", path, names=["ann", None])
