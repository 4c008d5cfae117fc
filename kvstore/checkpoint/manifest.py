"""The manifest of a checkpoint: what it consists of. To JSON, and back with every field checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvstore import sealed_folders
from kvstore.errors import CheckpointError
from kvstore.job.settings import MAX_NODES
from kvstore.rule import MODES
from kvstore.sealed_folders import FileRecord, integer
from kvstore.spec import Key, Spec, check_key
from kvstore.table import Table, TableSpec
from kvstore.wire.rows import table as require_described

FORMAT = "kvstore checkpoint 1"
MAX_MANIFEST = 256 << 20  # bytes
_FILE = re.compile(r"(store-\d{1,3}\.server-\d{1,4}|worker-\d{1,4})\.safetensors")


class StoredSegment(NamedTuple):
    """Elements ``start`` to ``stop`` of the array ``key``: in file number ``file``, under names that begin with ``id``.

    ``clock`` is how many rounds of it were over.
    """

    id: int
    key: Key
    start: int
    stop: int
    clock: int
    file: int


@dataclass(frozen=True)
class StoredStore:
    """One store of a checkpoint."""

    ordinal: int
    mode: str
    optimizer: str | None  # the name of the rule that the servers updated with; None if they assigned sums
    specs: Mapping[Key, Spec]
    segments: Sequence[StoredSegment]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of."""

    number: int
    rounds: int
    num_workers: int
    num_servers: int
    written: str
    stores: Sequence[StoredStore]
    files: Sequence[FileRecord]
    parts: Mapping[int, int] = field(default_factory=dict)  # by rank of a worker, the file of what it added

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


def save_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, which makes the files in ``folder`` a checkpoint."""
    sealed_folders.write(folder, to_json(manifest))


def load_manifest(folder: Path) -> Manifest:
    """Return the manifest of the checkpoint in ``folder``.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    return sealed_folders.read(folder, MAX_MANIFEST, "checkpoint", from_json)[0]


def to_json(manifest: Manifest) -> str:
    stores = [_store_fields(store) for store in manifest.stores]
    fields = {
        "format": FORMAT,
        "number": manifest.number,
        "rounds": manifest.rounds,
        "num_workers": manifest.num_workers,
        "num_servers": manifest.num_servers,
        "written": manifest.written,
        "files": [file._asdict() for file in manifest.files],
        "parts": [[rank, file] for rank, file in sorted(manifest.parts.items())],
        "stores": stores,
    }
    return json.dumps(fields, separators=(",", ":")) + "\n"


def _store_fields(store: StoredStore) -> dict[str, Any]:
    specs = list(dict.fromkeys(store.specs.values()))
    kinds = {spec: kind for kind, spec in enumerate(specs)}
    places = {key: place for place, key in enumerate(store.specs)}
    columns = [[segment.id, places[segment.key], *segment[2:]] for segment in store.segments]
    return {
        "ordinal": store.ordinal,
        "mode": store.mode,
        "optimizer": store.optimizer,
        "specs": [[spec.dtype, list(spec.shape)] for spec in specs],
        "keys": list(store.specs),
        "kinds": [kinds[spec] for spec in store.specs.values()],
        "tables": [[kind, spec.table.described] for spec, kind in kinds.items() if isinstance(spec, TableSpec)],
        "segments": columns,  # id, place of the key, start, stop, clock, file
    }


def from_json(text: str) -> Manifest:
    """Return the manifest that ``to_json`` wrote.

    Raises:
        CheckpointError: it is not one, or does not hold together.
    """
    return sealed_folders.parsed(text, FORMAT, _checked)


def _checked(given: Mapping[str, Any]) -> Manifest:
    files = [FileRecord.of(each, _FILE, "checkpoint") for each in given["files"]]
    if len({file.name for file in files}) < len(files):
        raise CheckpointError("a file is listed twice")
    written = given["written"]
    if not isinstance(written, str) or len(written) > 40:
        raise CheckpointError(f"written is {written!r:.60}, not a time")
    return Manifest(
        integer(given["number"]),
        integer(given["rounds"]),
        integer(given["num_workers"], 1, MAX_NODES),
        integer(given["num_servers"], 1, MAX_NODES),
        written,
        [_store(each, len(files)) for each in given["stores"]],
        files,
        {integer(rank, 0, MAX_NODES): integer(file, 0, len(files) - 1) for rank, file in given["parts"]},
    )


def _store(given: Any, files: int) -> StoredStore:
    mode, optimizer = given["mode"], given["optimizer"]
    if mode not in MODES:
        raise CheckpointError(f"mode {mode!r:.60} is not one of {', '.join(MODES)}")
    if optimizer is not None and (not isinstance(optimizer, str) or len(optimizer) > 64):
        raise CheckpointError(f"optimizer {optimizer!r:.80} is not a name")
    kinds = [Spec(tuple(map(integer, shape)), dtype) for dtype, shape in given["specs"]]
    for kind, described in given.get("tables", ()):
        kinds[integer(kind)] = TableSpec.of(_table(described))
    keys = [check_key(key) for key in given["keys"]]
    chosen = [kinds[integer(kind)] for kind in given["kinds"]]
    specs = dict(zip(keys, chosen, strict=True))
    if len(specs) < len(keys):
        raise CheckpointError("a key is listed twice")
    segments = []
    for number, place, start, stop, clock, file in given["segments"]:
        integer(number), integer(clock)
        segments.append(
            StoredSegment(
                number,
                keys[integer(place)],
                integer(start),
                integer(stop),
                clock,
                integer(file, 0, files - 1),
            )
        )
    _require_covered(specs, segments)
    return StoredStore(integer(given["ordinal"], 1), mode, optimizer, specs, segments)


def _table(described: Any) -> Table:
    """Return a table, checked as one that a message describes."""
    require_described(described)
    return Table.of(described)


def _require_covered(specs: Mapping[Key, Spec], segments: Sequence[StoredSegment]) -> None:
    """Raise ``CheckpointError`` unless the segments of each array are all of it, each element once."""
    reached = dict.fromkeys(specs, 0)
    seen = set()
    for segment in sorted(segments, key=lambda each: each.start):
        if segment.start != reached[segment.key] or segment.stop < segment.start:
            raise CheckpointError(f"segments of key {segment.key!r:.60} leave a gap, or overlap, at {segment.start}")
        reached[segment.key] = segment.stop
        seen.add((segment.file, segment.id))
    for key, stop in reached.items():
        if stop != specs[key].size:
            raise CheckpointError(f"segments of key {key!r:.60} end at {stop}, but it has {specs[key].size} elements")
    held = {segment.key for segment in segments}
    if without := [key for key, spec in specs.items() if isinstance(spec, TableSpec) and key not in held]:
        raise CheckpointError(f"table {without[0]!r:.60} has no segment")
    if len(seen) < len(segments):
        raise CheckpointError("a segment is listed twice")
