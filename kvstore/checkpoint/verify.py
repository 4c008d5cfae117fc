"""Whether the files of a checkpoint are what its manifest says."""

from __future__ import annotations

from pathlib import Path

from kvstore.checkpoint.manifest import Manifest, load_manifest
from kvstore.checkpoint.reader import CheckpointReader, value_name
from kvstore.checkpoint.tables import NUMBERS, rest_name
from kvstore.checkpoint.tensors import DTYPES, record_of
from kvstore.errors import CheckpointError
from kvstore.table import TableSpec


def verify(folder: Path) -> Manifest:
    """Read all files of the checkpoint in ``folder``; return its manifest.

    Raises:
        CheckpointError: a file is missing, or is not the one that was written; the message names it.
    """
    manifest = load_manifest(folder)
    for file in manifest.files:
        path = folder / file.name
        found = record_of(path)
        if found.nbytes != file.nbytes:
            raise CheckpointError(f"{path}: damaged: it has {found.nbytes} bytes, and {file.nbytes} were written")
        if found.sha256 != file.sha256:
            raise CheckpointError(f"{path}: damaged: its sha256 is {found.sha256}, and {file.sha256} was written")
    _require_segments(folder, manifest)
    return manifest


def _require_segments(folder: Path, manifest: Manifest) -> None:
    """Raise ``CheckpointError`` unless each segment's value, or what a table has beside its rows, is in its file."""
    with CheckpointReader(folder) as reader:
        by_file = [reader.specs(number) for number in range(len(manifest.files))]
    for store in manifest.stores:
        for segment in store.segments:
            if isinstance(store.specs[segment.key], TableSpec):
                if rest_name(segment.id, NUMBERS) not in by_file[segment.file]:
                    path = folder / manifest.files[segment.file].name
                    raise CheckpointError(f"{path}: damaged: it has nothing of table {segment.key!r}")
                continue
            wanted = DTYPES[store.specs[segment.key].dtype], [segment.stop - segment.start]
            there = by_file[segment.file].get(value_name(segment.id))
            if there != wanted:
                raise CheckpointError(
                    f"{folder / manifest.files[segment.file].name}: damaged: {value_name(segment.id)} is {there}, and "
                    f"the manifest says {wanted}"
                )
