"""Rows of CSV."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvstore as kv
from workers.callbacks import CSVRows


def write(path: Path, *calls: Mapping[str, float], start: int = 0) -> None:
    tracker = CSVRows(path)
    for step, values in enumerate(calls, start):
        tracker.log(values, step)
    tracker.close()


def read(path: Path) -> list[dict[str, float]]:
    """What a reader of CSV sees, without the times and without empty fields."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert {len(row) for row in rows} == {len(rows[0])}
    found = [{name: float(text) for name, text in zip(rows[0], row, strict=True) if text} for row in rows[1:]]
    return [{name: value for name, value in row.items() if name != "wall_time"} for row in found]


def test_new_names_are_new_columns_also_when_a_file_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "run.csv"
    write(path, {"loss": 0.25}, {"accuracy": 0.5}, {"loss": 0.125, "epoch": 1})
    write(path, {"accuracy": 0.75, "top, 5": 1.0}, start=3)
    assert path.read_text().splitlines()[0] == 'step,wall_time,loss,accuracy,epoch,"top, 5"'
    assert read(path) == [
        {"step": 0, "loss": 0.25},
        {"step": 1, "accuracy": 0.5},
        {"step": 2, "loss": 0.125, "epoch": 1},
        {"step": 3, "accuracy": 0.75, "top, 5": 1.0},
    ]
    assert [file.name for file in path.parent.iterdir()] == ["run.csv"]


def test_nothing_is_rewritten_while_names_stay(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    write(path, {"loss": 1.0})
    inode = path.stat().st_ino
    write(path, {"loss": 2.0}, {"loss": math.inf}, {"loss": math.nan}, start=1)
    assert path.stat().st_ino == inode
    assert [repr(row["loss"]) for row in read(path)] == ["1.0", "2.0", "inf", "nan"]


def test_a_row_without_its_end_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    write(path, {"loss": 1.0}, {"loss": 2.0})
    path.write_bytes(path.read_bytes()[:-3])
    write(path, {"loss": 3.0}, start=1)
    assert read(path) == [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 3.0}]


def test_a_link_stays_one(tmp_path: Path) -> None:
    link = tmp_path / "link.csv"
    link.symlink_to(tmp_path / "run.csv")
    write(link, {"loss": 1.0})
    assert link.is_symlink()
    assert read(link) == [{"step": 0, "loss": 1.0}]


@pytest.mark.parametrize("content", ["time,loss\n1,2\n", "step,wall_times\n1,2\n"])
def test_somebody_elses_file_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.csv"
    path.write_text(content)
    with pytest.raises(kv.UsageError, match="choose another name"):
        CSVRows(path)
    assert path.read_text() == content


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=4)
CALLS = st.lists(st.dictionaries(NAMES, st.floats(allow_nan=False), max_size=4), max_size=6)


@settings(max_examples=10, deadline=None)
@given(CALLS, CALLS)
def test_what_is_read_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, calls: list[dict[str, float]], more: list[dict[str, float]]
) -> None:
    path = tmp_path_factory.mktemp("csv") / "run.csv"
    write(path, *calls)
    write(path, *more, start=len(calls))
    if calls or more:
        assert read(path) == [{"step": step, **values} for step, values in enumerate([*calls, *more])]
