"""A table in files: saves in a directory, each whole or what has changed since an earlier one.

    DIR/save-00000001/        a whole table
        ids.int64             the ids, in the order of the rows
        rows.float32          the rows, back to back (or rows.float64)
        seen.int64            1 + the update that touched each row last; with states, as are the next two
        count.int64           how often each was touched, if rows go by that
        state.NAME.DTYPE      what the optimizer keeps of each row
        index.int32           where an id is: see below
        gone.int64            empty
        manifest.json         written last: what the table is, and the size and sha256 of each file
    DIR/save-00000002/        a delta: only rows that have changed
        gone.int64            the ids, rising, of rows that are not there any more
        manifest.json         also names the save that it continues, with the sha256 of its manifest

Numbers are little-endian, without headers. A folder without a manifest is no save, and can be removed. The index is an
open hash table of row numbers, a power of two of them; -1 is free. The row of an id is searched for from entry
``h % entries`` on, up to a free one; ``h`` is splitmix64 of the id (``kvstore.rows.ids.mixed``).
"""

from __future__ import annotations

import datetime
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from kvstore.errors import CheckpointError, UsageError
from kvstore.job.files import sync_directory
from kvstore.lineage import Version
from kvstore.manifests import MANIFEST, FileRecord
from kvstore.rows.frozen_rows import Page
from kvstore.rows.ids import Ids
from kvstore.rows.index import SlotIndex
from kvstore.rows.slabs import Array
from kvstore.rows.stripe import PartSpec
from kvstore.rows.table_manifest import (
    GONE,
    IDS,
    INDEX,
    ROWS,
    Base,
    TableManifest,
    load_manifest,
    save_manifest,
)
from kvstore.spec import Key
from kvstore.table import Table

_NAME = re.compile(r"save-(\d{8,18})")
_PIECE = 4 << 20  # bytes that are hashed and written at a time


class Save(NamedTuple):
    """A save in a directory: its folder, what it consists of, and the sha256 of its manifest."""

    folder: Path
    manifest: TableManifest
    sha256: str


class FrozenState(NamedTuple):
    """What the stripes of a table were when they were frozen, in the order of the servers.

    Attributes:
        versions: the state of each.
        steps: how many of its updates its optimizer had made.
        parts: what pages bring of each row beside its values; empty without states.
        rule: of the optimizer whose states they are; None for none.
        whole: why pages bring all rows, though only what had changed was asked for; empty if they do not.
    """

    versions: Sequence[Version]
    steps: Sequence[int]
    parts: dict[str, PartSpec]
    rule: str | None = None
    whole: str = ""


def folders(directory: Path) -> list[Path]:
    try:
        matches = [match for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise CheckpointError(f"{directory}: cannot be read as a directory of tables: {exc.strerror}") from None
    ordered = sorted(matches, key=lambda match: int(match[1]))
    return [path for match in ordered if (path := directory / match[0]) and (path / MANIFEST).exists()]


def newest(directory: Path) -> Save:
    """Return the last save in ``directory``."""
    whole = folders(directory)
    if not whole:
        raise CheckpointError(f"{directory}: no saved table there")
    return Save(whole[-1], *load_manifest(whole[-1]))


def base_of(directory: Path, since: int, key: Key, table: Table, stripes: int) -> Save:
    """Return the save that a delta may continue: the last one of version ``since``.

    Freeze stripe ``i`` with ``since=save.manifest.versions[i]``: the stripe knows whether it continues that state. The
    number alone does not tell.

    Raises:
        UsageError: there is no such save, or it is of another table, or of another number of servers.
    """
    versions = []
    for folder in reversed(folders(directory)):
        save = Save(folder, *load_manifest(folder))
        if save.manifest.version == since:
            break
        versions.append(save.manifest.version)
    else:
        known = f"those there are of {sorted(set(versions))}" if versions else "there is none at all"
        raise UsageError(f"{directory}: no save of version {since}; {known}; save the whole table (since=None)")
    manifest = save.manifest
    if (manifest.key, manifest.table) != (key, table.alone):
        raise UsageError(f"{folder} is of key {manifest.key!r}, {manifest.table}, not of key {key!r}, {table}")
    if len(manifest.versions) != stripes:
        raise UsageError(
            f"{folder} was saved by {len(manifest.versions)} servers, and these are {stripes}: a delta needs as many; "
            f"save the whole table (since=None)"
        )
    return save


def write_save(
    directory: Path,
    key: Key,
    table: Table,
    state: FrozenState,
    pages: Iterable[Page],
    gone: Iterable[Ids] = (),
    base: Save | None = None,
) -> Save:
    """Write a save of a table; it counts once all of it is on the disk.

    Args:
        gone: for a delta, ids of rows that have gone.
        base: for a delta, what it continues.

    Raises:
        UsageError: a page is of another table, or brings a row again.
        OSError: it cannot be written.
    """
    folder = _begun(directory)
    try:
        with ExitStack() as stack:
            files = {
                IDS: stack.enter_context(_File(folder / f"{IDS}.int64")),
                ROWS: stack.enter_context(_File(folder / f"{ROWS}.{table.dtype}")),
                GONE: stack.enter_context(_File(folder / f"{GONE}.int64")),
                INDEX: stack.enter_context(_File(folder / f"{INDEX}.int32")),
            }
            for name, part in state.parts.items():
                files[name] = stack.enter_context(_File(folder / f"{name}.{part.dtype}"))
            index = _write_pages(files, table, state, pages)
            lost = np.unique(np.concatenate([np.empty(0, np.int64), *gone]))
            files[GONE].write(lost)
            files[INDEX].write(index.entries)
            records = tuple(file.finished() for file in files.values())
        manifest = TableManifest(
            key=key,
            table=table,
            parts=state.parts,
            rows=len(index),
            gone=len(lost),
            versions=tuple(state.versions),
            steps=tuple(state.steps),
            rule=state.rule,
            base=None if base is None else Base(base.folder.name, base.sha256),
            written=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            files=records,
        )
        sync_directory(folder)
        sync_directory(directory)
        save_manifest(folder, manifest)
    except BaseException:
        _remove(folder)
        raise
    return Save(folder, *load_manifest(folder))


def _write_pages(files: dict[str, _File], table: Table, state: FrozenState, pages: Iterable[Page]) -> SlotIndex:
    index = SlotIndex()
    for page in pages:
        shape = (len(page.ids), table.width)
        if page.rows.shape != shape or page.rows.dtype != table.dtype or page.parts.keys() != state.parts.keys():
            raise UsageError(
                f"a page of {page.rows.shape} {page.rows.dtype} and {sorted(page.parts)} is not of {table}"
            )
        ids = np.sort(page.ids)
        if (ids[1:] == ids[:-1]).any() or (index.find(page.ids) >= 0).any():
            raise UsageError(f"a row of {table} came twice: it must be saved once")
        index.insert(page.ids)  # which numbers the rows as they come
        files[IDS].write(page.ids)
        files[ROWS].write(page.rows)
        for name, (dtype, columns) in state.parts.items():
            part = page.parts[name]
            if part.shape != ((len(ids), columns) if columns else (len(ids),)) or part.dtype != dtype:
                raise UsageError(f"{name!r} of a page has {part.shape} {part.dtype}, not {columns} columns of {dtype}")
            files[name].write(part)
    return index


def _begun(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    while True:
        numbers = [int(match[1]) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
        folder = directory / f"save-{max(numbers, default=0) + 1:08d}"
        try:
            folder.mkdir()
        except FileExistsError:  # by another thread of this process
            continue
        return folder


def _remove(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink(missing_ok=True)
    folder.rmdir()


class _File:
    """A new file of numbers, little-endian, with the sha256 of what has been written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digest, self._nbytes = hashlib.sha256(), 0
        self._file: BinaryIO | None = None

    def __enter__(self) -> _File:
        self._file = self._path.open("xb", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, values: Array) -> None:
        assert self._file is not None  # noqa: S101 - it is open
        plain = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
        view = plain.reshape(-1).view(np.uint8).data
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            self._digest.update(piece)
            while piece:
                piece = piece[self._file.write(piece) :]
        self._nbytes += len(view)

    def finished(self) -> FileRecord:
        """Have all of it on the disk; return what it is."""
        assert self._file is not None  # noqa: S101 - it is open
        os.fsync(self._file.fileno())
        return FileRecord(self._path.name, self._nbytes, self._digest.hexdigest())
