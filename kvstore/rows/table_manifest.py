"""The manifest of a saved table: what its files are. To JSON, and back with every field checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvstore import manifests
from kvstore.errors import CheckpointError
from kvstore.lineage import UNKNOWN, Version
from kvstore.manifests import FileRecord, integer, sha256, text
from kvstore.rows.stripe import PartSpec
from kvstore.spec import ITEMSIZE, Key, check_key
from kvstore.table import DTYPES, Table

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
        versions: by stripe, its state: how many updates it had had, and in which lineage.
        steps: by stripe, how many of them the optimizer had made.
        base: what a delta continues; None for a whole table.
    """

    key: Key
    table: Table
    parts: Mapping[str, PartSpec]
    rows: int
    gone: int
    versions: tuple[Version, ...]
    steps: tuple[int, ...]
    rule: str | None
    base: Base | None
    written: str
    files: tuple[FileRecord, ...]

    @property
    def version(self) -> int:
        """The most updates that a stripe had had."""
        return max(version.number for version in self.versions)

    @property
    def lineages(self) -> list[int]:
        return [version.lineage for version in self.versions]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


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
    manifests.write(folder, to_json(manifest))


def load_manifest(folder: Path) -> tuple[TableManifest, str]:
    """Return the manifest in ``folder``, and its sha256.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    return manifests.read(folder, MAX_MANIFEST, "saved table", from_json)


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
    return manifests.parsed(manifest, FORMAT, _checked)


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
