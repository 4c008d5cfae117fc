"""What ``Log`` writes to: JSON lines, CSV, TensorBoard's event files, and any other by a function or two."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from kvstore import UnknownName, UsageError
from kvstore.job.files import replacing


class Tracker(Protocol):
    """What a ``Log`` writes to. Any object with these two methods is one."""

    def log(self, values: Mapping[str, float], step: int) -> object:
        """Keep the values of a step.

        Args:
            values: numbers by name.
            step: the number of the step. It mostly grows from call to call. It may be the same, with other names.
        """

    def close(self) -> object:
        """Write what has not been written, and release everything. Called once."""


@dataclass(frozen=True)
class TrackerOfFunctions:
    """A tracker made of functions."""

    log: Callable[..., object]
    close: Callable[[], object]


def tracker_of(log: Callable[..., Any], close: Callable[[], Any] | None = None) -> Tracker:
    """Return a tracker that is made of functions, such as those of another library.

        tracker_of(run.log, run.finish)                  # of W&B's run
        tracker_of(mlflow.log_metrics, mlflow.end_run)

    Args:
        log: called as ``log(values, step)`` with a dict of numbers by name, and the number of the step.
        close: called at the end, without arguments; None for nothing.
    """
    return TrackerOfFunctions(log, close or (lambda: None))


_BLOCK = 1 << 16


class LineFile:
    """A file to which whole lines are appended. ``start`` is what such a file begins with, unless it is empty."""

    def __init__(self, path: Path, start: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            begins = os.pread(self._fd, len(start), 0)
            if not start.startswith(begins):
                raise UsageError(f"{path} has other content, which begins with {begins!r}; choose another name")
            # A machine that failed, or a full disk, has left a part of a line: the next line would be joined to it.
            self._size = _whole_lines(self._fd)
            os.ftruncate(self._fd, self._size)
        except BaseException:
            os.close(self._fd)
            raise

    def append(self, line: str) -> None:
        """Write a line, which has its end, or nothing of it."""
        data = line.encode()
        try:  # one write for a line, so that a kill loses at most this line
            written = os.write(self._fd, data)
            while written < len(data):  # the disk is full, or nearly
                written += os.write(self._fd, data[written:])
        except BaseException:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)

    def close(self) -> None:
        os.close(self._fd)


def _whole_lines(fd: int) -> int:
    """Return the size of a file without a last line that has no end."""
    end = os.fstat(fd).st_size
    while end > 0:
        begin = max(0, end - _BLOCK)
        found = os.pread(fd, end - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0


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
        with self._path.open(newline="", encoding="utf-8") as file:
            self._columns = next(csv.reader(file), [])
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


def _line(fields: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(fields)
    return text.getvalue()


_FLUSH_S = 2
_numbers = itertools.count()
_written: set[Path] = set()  # folders that this process has written to


class TensorBoard:
    """A tracker that writes scalars for TensorBoard (``tensorboard --logdir FOLDER``). It needs tensorboardX.

    Every run of a program adds a file to the folder. If there are some, TensorBoard hides what they have of the first
    step of this run and later ones: a run resumed from a checkpoint makes these steps again. Values are written every
    two seconds, so a kill loses no more.

    Args:
        folder: the folder of a run's files. It is made when needed.

    Raises:
        UsageError: tensorboardX is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            import tensorboardX  # noqa: F401
        except ImportError as exc:
            raise UsageError(
                f"TensorBoard needs tensorboardX: pip install 'torch-kvstore[tensorboard]' ({exc})"
            ) from None
        self._folder = Path(folder).resolve()
        self._writer: Any = None

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write a scalar for each of the ``values`` of ``step``."""
        if self._writer is None:
            self._writer = self._open(step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write everything, and close the file."""
        if self._writer is not None:
            self._writer.close()

    def _open(self, step: int) -> Any:
        from tensorboardX import SummaryWriter

        resumed = self._folder not in _written and any(self._folder.glob("events.out.tfevents.*"))
        _written.add(self._folder)
        # tensorboardX names a file by the second, and would replace another of the same second.
        suffix = f".{os.getpid()}.{next(_numbers)}"
        return SummaryWriter(
            str(self._folder), purge_step=step if resumed else None, flush_secs=_FLUSH_S, filename_suffix=suffix
        )


def tracker_by_path(path: str | os.PathLike[str]) -> Callable[[], Tracker]:
    """Return a function that makes the tracker that ``path`` stands for, by its ending."""
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
