"""``CSVRows``: a tracker that writes a row of a CSV file for each call."""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvstore import UsageError
from kvstore.job.files import replacing
from workers.callbacks.trackers.appending import LineFile

_FIRST = ("step", "wall_time")
_START = ",".join(_FIRST).encode()


class CSVRows:
    """A tracker that appends a row to a CSV file for each call, under a header with the names.

    The first columns are ``step`` and ``wall_time``, in seconds since 1970. A name that has not occurred before becomes
    a new column at the end: the file is then replaced, whole, by one with the longer header and empty fields in all
    rows before. A value that a call does not name is an empty field. An existing file is continued. A step that was
    trained twice, because a run was resumed from a checkpoint before it, is there twice: the later row counts.

    Args:
        path: the file. Its folders are made when needed.

    Raises:
        UsageError: the file has other content.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).resolve()  # a link stays, and what it points to is replaced
        self._file = LineFile(self._path, _START)
        self._columns = _header(self._path)
        if tuple(self._columns[:2]) not in ((), _FIRST):
            self._file.close()
            raise UsageError(f"{path} has other columns, {', '.join(self._columns[:2])}, ...; choose another name")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Append a row with the ``values`` of ``step``; before that, if there are new names, widen the file."""
        row: dict[str, float] = {"step": step, "wall_time": round(time.time(), 3), **values}
        if new := [name for name in row if name not in self._columns]:
            self._widen([*self._columns, *new])
        self._file.append(_line(["" if row.get(name) is None else repr(row[name]) for name in self._columns]))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _widen(self, columns: list[str]) -> None:
        with (
            self._path.open(newline="", encoding="utf-8") as old,
            replacing(self._path) as draft,
            draft.open("w", newline="", encoding="utf-8") as new,
        ):
            rows = csv.reader(old)
            next(rows, None)
            new.write(_line(columns))
            for row in rows:
                new.write(_line([*row, *[""] * (len(columns) - len(row))]))
        widened = LineFile(self._path, _START)
        self._file.close()
        self._file, self._columns = widened, columns


def _header(path: Path) -> list[str]:
    with path.open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file), [])


def _line(fields: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(fields)
    return text.getvalue()
