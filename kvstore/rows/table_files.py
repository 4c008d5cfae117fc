"""A table in files: saves in a directory, each whole or what has changed since an earlier one.

    DIR/save-00000001/        a whole table
        ids.int64             the ids, in the order of the rows
        rows.float32          the rows, back to back (or rows.float64, rows.float16, rows.bfloat16)
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
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvstore import sealed_folders
from kvstore.errors import CheckpointError, UsageError
from kvstore.job.files import sync_directory
from kvstore.lineage import UNKNOWN, Version
from kvstore.rows.frozen_rows import Page
from kvstore.rows.halves import array_dtype
from kvstore.rows.ids import Ids
from kvstore.rows.index import SlotIndex
from kvstore.rows.slabs import Array
from kvstore.rows.stripe import PartSpec
from kvstore.sealed_folders import MANIFEST, FileRecord, HashedFile, integer, numbered, sha256, text
from kvstore.spec import ITEMSIZE, Key, check_key
from kvstore.table import DTYPES, Table

_NAME = re.compile(r"save-(\d{8,18})")

FORMAT = "kvstore table 1"
MAX_MANIFEST = 1 << 20  # bytes
MAX_PARTS = 64
IDS, INDEX, ROWS, GONE = "ids", "index", "rows", "gone"  # the files that each save has, by name without ending
_SAVE = re.compile(r"save-\d{8,18}")
_FILE = re.compile(r"[A-Za-z0-9_.-]{1,90}")
_PART = re.compile(r"(?!\.)[A-Za-z0-9_.-]{1,80}")
_TABLE = ("rows", "row", "dtype", "init", "scale", "seed", "admit", "evict", "codec")  # as ``Table.described``


class Base(NamedTuple):
    """The save that a delta continues: its folder, beside the delta's, and the sha256 of its manifest."""

    folder: str
    sha256: str


@dataclass(frozen=True)
class TableManifest:
    """What a save of a table consists of.

    Attributes:
        rows, gone: how many rows are saved, and how many ids of rows that have gone.
    """

    key: Key
    table: Table
    parts: Mapping[str, PartSpec]
    rows: int
    gone: int
    versions: tuple[Version, ...]  # by stripe, its state: how many updates it had had, and in which lineage
    steps: tuple[int, ...]  # by stripe, how many of them the optimizer had made
    rule: str | None
    base: Base | None  # what a delta continues; None for a whole table
    written: str
    files: tuple[FileRecord, ...]

    @property
    def version(self) -> int:
        """The most updates that a stripe had had."""
        return max(version.number for version in self.versions)

    @property
    def lineages(self) -> list[int]:
        return [version.lineage for version in self.versions]


def file_sizes(manifest: TableManifest) -> dict[str, int | None]:
    """Return the names of the files that a save must have, each with its bytes; None for the index."""
    sizes: dict[str, int | None] = {
        f"{IDS}.int64": manifest.rows * 8,
        f"{INDEX}.int32": None,
        f"{ROWS}.{manifest.table.dtype}": manifest.rows * manifest.table.row_bytes,
        f"{GONE}.int64": manifest.gone * 8,
    }
    for name, (dtype, columns) in manifest.parts.items():
        sizes[f"{name}.{dtype}"] = manifest.rows * max(1, columns) * ITEMSIZE[dtype]
    return sizes


def save_manifest(folder: Path, manifest: TableManifest) -> None:
    """Write the manifest, which makes the files in ``folder`` a save."""
    sealed_folders.write(folder, to_json(manifest))


def load_manifest(folder: Path) -> tuple[TableManifest, str]:
    """Return the manifest in ``folder``, and its sha256.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    return sealed_folders.read(folder, MAX_MANIFEST, "saved table", from_json)


def to_json(manifest: TableManifest) -> str:
    fields = {
        "format": FORMAT,
        "key": manifest.key,
        "table": dict(zip(_TABLE, manifest.table.alone.described, strict=True)),
        "parts": {name: list(part) for name, part in manifest.parts.items()},
        "rows": manifest.rows,
        "gone": manifest.gone,
        "versions": [version.number for version in manifest.versions],
        "lineages": manifest.lineages,
        "steps": manifest.steps,
        "rule": manifest.rule,
        "base": None if manifest.base is None else manifest.base._asdict(),
        "written": manifest.written,
        "files": [file._asdict() for file in manifest.files],
    }
    return json.dumps(fields, indent=1) + "\n"


def from_json(manifest: str) -> TableManifest:
    """Return the manifest that ``to_json`` wrote.

    Raises:
        CheckpointError: it is something else, or a field cannot be right.
    """
    return sealed_folders.parsed(manifest, FORMAT, _checked)


def _checked(fields: Mapping[str, Any]) -> TableManifest:
    parts = {}
    for name, (dtype, columns) in fields["parts"].items():
        if not _PART.fullmatch(name) or name in (IDS, INDEX, ROWS, GONE) or dtype not in (*DTYPES, "int64"):
            raise CheckpointError(f"part {name!r} of {dtype!r} is not valid")
        parts[name] = PartSpec(dtype, integer(columns))
    base = fields["base"]
    if base is not None:
        base = Base(text(base["folder"], _SAVE), sha256(base["sha256"]))
    rule = fields["rule"]
    if (rule is not None and not isinstance(rule, str)) or not isinstance(fields["written"], str):
        raise CheckpointError("rule and written must be texts")
    table = Table.of([fields["table"][name] for name in _TABLE])
    numbers = list(map(integer, fields["versions"]))
    lineages = list(map(integer, fields.get("lineages", [UNKNOWN] * len(numbers))))  # saves had none once
    manifest = TableManifest(
        key=check_key(fields["key"]),
        table=table,
        parts=parts,
        rows=integer(fields["rows"]),
        gone=integer(fields["gone"]),
        versions=tuple(map(Version, lineages, numbers)),
        steps=tuple(map(integer, fields["steps"])),
        rule=rule,
        base=base,
        written=fields["written"],
        files=tuple(FileRecord.of(file, _FILE, "saved table") for file in fields["files"]),
    )
    if not numbers or not len(numbers) == len(lineages) == len(manifest.steps) or len(parts) > MAX_PARTS:
        raise CheckpointError("versions, lineages and steps must be as many as stripes, and parts few")
    _require_files(manifest)
    return manifest


def _require_files(manifest: TableManifest) -> None:
    sizes, listed = file_sizes(manifest), {file.name: file.nbytes for file in manifest.files}
    if len(listed) != len(manifest.files) or listed.keys() != sizes.keys():
        raise CheckpointError(f"expected the files {sorted(sizes)}, it lists {sorted(listed)}")
    for name, nbytes in listed.items():
        wanted = sizes[name]
        if wanted is None:
            entries = nbytes // 4
            if nbytes % 4 or entries & (entries - 1) or entries <= manifest.rows:
                raise CheckpointError(f"{name} cannot have {nbytes} bytes for {manifest.rows} rows")
        elif nbytes != wanted:
            raise CheckpointError(f"{name} must have {wanted} bytes, it lists {nbytes}")


class Save(NamedTuple):
    """A save in a directory: its folder, what it consists of, and the sha256 of its manifest."""

    folder: Path
    manifest: TableManifest
    sha256: str


class FrozenState(NamedTuple):
    """What the stripes of a table were when they were frozen, in the order of the servers."""

    versions: Sequence[Version]  # the state of each
    steps: Sequence[int]  # how many of its updates its optimizer had made
    parts: dict[str, PartSpec]  # what pages bring of each row beside its values; empty without states
    rule: str | None = None  # of the optimizer whose states they are; None for none
    whole: str = ""  # why pages bring all rows, though only what had changed was asked for; empty if they do not


def folders(directory: Path) -> list[Path]:
    return [path for _, path in numbered(directory, _NAME, "tables") if (path / MANIFEST).exists()]


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
            kinds = {IDS: "int64", ROWS: table.dtype, GONE: "int64", INDEX: "int32"}
            kinds |= {name: part.dtype for name, part in state.parts.items()}
            names = {name: f"{name}.{dtype}" for name, dtype in kinds.items()}
            files = {name: stack.enter_context(HashedFile(folder / file)) for name, file in names.items()}
            index = _write_pages(files, table, state, pages)
            lost = np.unique(np.concatenate([np.empty(0, np.int64), *gone]))
            files[GONE].write(_plain(lost))
            files[INDEX].write(_plain(index.entries))
            for file in files.values():
                file.sync()
            records = tuple(file.record(names[name]) for name, file in files.items())
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


def _write_pages(files: dict[str, HashedFile], table: Table, state: FrozenState, pages: Iterable[Page]) -> SlotIndex:
    index = SlotIndex()
    for page in pages:
        shape = (len(page.ids), table.width)
        if (
            page.rows.shape != shape
            or page.rows.dtype != array_dtype(table.dtype)
            or page.parts.keys() != state.parts.keys()
        ):
            raise UsageError(
                f"a page of {page.rows.shape} {page.rows.dtype} and {sorted(page.parts)} is not of {table}"
            )
        ids = np.sort(page.ids)
        if (ids[1:] == ids[:-1]).any() or (index.find(page.ids) >= 0).any():
            raise UsageError(f"a row of {table} came twice: it must be saved once")
        index.insert(page.ids)  # which numbers the rows as they come
        files[IDS].write(_plain(page.ids))
        files[ROWS].write(_plain(page.rows))
        for name, (dtype, columns) in state.parts.items():
            part = page.parts[name]
            if part.shape != ((len(ids), columns) if columns else (len(ids),)) or part.dtype != dtype:
                raise UsageError(f"{name!r} of a page has {part.shape} {part.dtype}, not {columns} columns of {dtype}")
            files[name].write(_plain(part))
    return index


def _begun(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    while True:
        numbers = [number for number, _ in numbered(directory, _NAME, "tables")]
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


def _plain(values: Array) -> memoryview:
    """Return numbers as files have them: little-endian, whatever this machine is."""
    return np.ascontiguousarray(values, values.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data
