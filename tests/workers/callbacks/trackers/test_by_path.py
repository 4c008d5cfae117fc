"""What a path stands for."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import kvstore as kv
from workers.callbacks import CSVRows, JSONLines, TensorBoard
from workers.callbacks.trackers import tracker_by_path


@pytest.mark.parametrize(("path", "kind"), [("a/run.jsonl", JSONLines), ("run.csv", CSVRows), ("runs/", TensorBoard)])
def test_a_path_stands_for_a_tracker(path: str, kind: type) -> None:
    factory = tracker_by_path(path)
    assert isinstance(factory, partial)
    assert (factory.func, factory.args) == (kind, (path,))


@pytest.mark.parametrize("path", ["run.txt", "runs", Path("runs/"), ""])
def test_another_end_is_an_error(path: str | Path) -> None:
    with pytest.raises(kv.UnknownName, match=r"end it in \.jsonl \(JSON lines\), \.csv, or / \(a folder"):
        tracker_by_path(path)
