"""Which tracker a path stands for."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from kvstore import UnknownName
from workers.callbacks.trackers.csv_rows import CSVRows
from workers.callbacks.trackers.json_lines import JSONLines
from workers.callbacks.trackers.tensorboard import TensorBoard
from workers.callbacks.trackers.tracker import Tracker


def tracker_by_path(path: str | os.PathLike[str]) -> Callable[[], Tracker]:
    """Return a function that makes the tracker that ``path`` stands for, by its ending.

    Args:
        path: a file that ends in ``.jsonl`` or ``.csv``, or a folder, with a slash at its end, for TensorBoard.

    Raises:
        UnknownName: it has another ending.
    """
    text = os.fspath(path)
    if text.endswith(".jsonl"):
        return partial(JSONLines, text)
    if text.endswith(".csv"):
        return partial(CSVRows, text)
    if text.endswith(os.sep):
        return partial(TensorBoard, text)
    raise UnknownName(
        f"cannot tell what to write to {text!r}; end it in .jsonl (JSON lines), .csv, or / (a folder for TensorBoard)"
    )
