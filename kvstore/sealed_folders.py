"""Folders of files with a manifest, as checkpoints and saves of tables are: a JSON file that lists the others.

The manifest is written last, and makes the folder count; every field is checked when it is read back.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvstore.errors import CheckpointError, KVStoreError
from kvstore.job.files import read_manifest, replacing, require_plain

T = TypeVar("T")

MANIFEST = "manifest.json"
PIECE = 4 << 20  # bytes that are hashed and written at a time: what is hashed is still in the cache when it is written
_SHA256 = re.compile(r"[0-9a-f]{64}")


class FileRecord(NamedTuple):
    """A file that a manifest lists, by its name in the folder."""

    name: str
    nbytes: int
    sha256: str

    @classmethod
    def of(cls, given: Any, names: re.Pattern[str], what: str) -> FileRecord:
        """Return a file that JSON lists, of a ``what``. ``names`` must match no separators, so no file lies outside."""
        name = given["name"]
        if not isinstance(name, str) or not names.fullmatch(name):
            raise CheckpointError(f"{name!r:.60} is not the name of a {what}'s file")
        return cls(name, integer(given["nbytes"]), sha256(given["sha256"]))


class HashedFile:
    """A new file, or one in place of an empty one, with the size and sha256 of what has been written."""

    def __init__(self, path: Path) -> None:
        self._digest, self._nbytes = hashlib.sha256(), 0
        self._file = path.open("wb", buffering=0)

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, buffer: memoryview | bytes) -> None:
        view = memoryview(buffer).cast("B")
        for start in range(0, len(view), PIECE):
            piece = view[start : start + PIECE]
            self._digest.update(piece)
            while piece:  # a write may be made in part: on a disk that fills up, say
                piece = piece[self._file.write(piece) :]
        self._nbytes += len(view)

    def sync(self) -> None:
        """Have all of it on the disk."""
        os.fsync(self._file.fileno())

    def record(self, name: str) -> FileRecord:
        return FileRecord(name, self._nbytes, self._digest.hexdigest())


def record_of(path: Path) -> FileRecord:
    """Return what ``path`` is now: its size and sha256. Raises ``CheckpointError`` if it is missing or unreadable."""
    try:
        require_plain(path)
        with path.open("rb", buffering=0) as file:
            digest, size = hashlib.sha256(), 0
            while piece := file.read(PIECE):
                digest.update(piece)
                size += len(piece)
    except OSError as exc:
        raise CheckpointError(f"{path}: missing or unreadable: {exc.strerror}") from None
    return FileRecord(path.name, size, digest.hexdigest())


def numbered(directory: Path, names: re.Pattern[str], what: str) -> list[tuple[int, Path]]:
    """Return the folders in ``directory`` whose names match, by the number in them; none if it does not exist.

    Raises:
        CheckpointError: it cannot be read as a directory of ``what``.
    """
    try:
        found = [match for path in directory.iterdir() if (match := names.fullmatch(path.name))]
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise CheckpointError(f"{directory}: cannot be read as a directory of {what}: {exc.strerror}") from None
    return sorted((int(match[1]), directory / match[0]) for match in found)


def write(folder: Path, manifest: str) -> None:
    """Write the manifest, which makes the files in ``folder`` a checkpoint or a save: it is written last."""
    with replacing(folder / MANIFEST) as draft:
        draft.write_text(manifest)


def read(folder: Path, most: int, what: str, parse: Callable[[str], T]) -> tuple[T, str]:
    """Return the manifest in ``folder``, and its sha256.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = folder / MANIFEST
    raw = read_manifest(path, most, what)
    try:
        return parse(raw.decode()), hashlib.sha256(raw).hexdigest()
    except (CheckpointError, UnicodeDecodeError) as exc:
        raise CheckpointError(f"{path}: damaged: {exc}") from None


def parsed(manifest: str, form: str, check: Callable[[dict[str, Any]], T]) -> T:
    """Return what ``check`` makes of the fields of a manifest of the format ``form``.

    Raises:
        CheckpointError: it has another format, or ``check`` finds a field that is missing or cannot be right.
    """
    try:
        fields = json.loads(manifest)
        if not isinstance(fields, dict) or fields.get("format") != form:
            raise CheckpointError(f"expected a manifest of the format {form!r}")
        return check(fields)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as exc:
        raise CheckpointError(f"a field is missing or of the wrong type: {type(exc).__name__}: {exc}") from None
    except CheckpointError:
        raise
    except KVStoreError as exc:  # of a key, a spec, or a table, which is described as in messages
        raise CheckpointError(str(exc)) from None


def integer(value: Any, low: int = 0, high: int = 2**62 - 1) -> int:
    """Return an integer of a manifest; raise ``CheckpointError`` unless it is one from ``low`` to ``high``."""
    if type(value) is not int or not low <= value <= high:
        raise CheckpointError(f"expected an integer from {low} to {high}, got {value!r:.60}")
    return value


def text(value: Any, pattern: re.Pattern[str]) -> str:
    """Return a text of a manifest; raise ``CheckpointError`` unless all of it matches ``pattern``."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise CheckpointError(f"expected a text like {pattern.pattern}, got {value!r:.80}")
    return value


def sha256(value: Any) -> str:
    """Return a sha256 in hexadecimal; raise ``CheckpointError`` unless it is one."""
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise CheckpointError(f"{value!r:.80} is not a sha256 in hexadecimal")
    return value
