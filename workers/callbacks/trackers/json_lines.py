"""``JSONLines``: a tracker that writes a line of JSON for each call."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path

from workers.callbacks.trackers.appending import LineFile


class JSONLines:
    """A tracker that appends a line to a file for each call: an object in JSON.

        {"step": 50, "wall_time": 1764128400.25, "batch/loss": 0.25}

    ``wall_time`` is in seconds since 1970. JSON has no word for NaN, which is written as ``null``; infinity is written
    as ``1e999``, which JSON's readers take for infinity. An existing file is continued. A step that was trained twice,
    because a run was resumed from a checkpoint before it, is there twice: the later line counts.

    Args:
        path: the file. Its folders are made when needed.

    Raises:
        UsageError: the file has other content.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = LineFile(Path(path), b"{")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Append a line with the ``values`` of ``step``."""
        pairs: dict[str, float] = {"step": step, "wall_time": round(time.time(), 3), **values}
        shown = ", ".join(f"{json.dumps(name)}: {_number(value)}" for name, value in pairs.items())
        self._file.append(f"{{{shown}}}\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _number(value: float) -> str:
    if math.isnan(value):
        return "null"
    return json.dumps(value) if math.isfinite(value) else ("1e999" if value > 0 else "-1e999")
