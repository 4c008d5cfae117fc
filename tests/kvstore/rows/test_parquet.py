import numpy as np
import pytest
from row_rules import Momentum

from kvstore.errors import UsageError
from kvstore.rows.open_table import export_parquet, open_table
from kvstore.rows.row_table import RowTable
from kvstore.rows.saving import FrozenReading, OpenSaves, save_table
from kvstore.rows.table_files import FrozenState
from kvstore.table import Table


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
