"""A checkpoint as one plain safetensors file of arrays by name, which needs nothing of this package to be read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvstore.checkpoint.exported_table import ExportedTable
from kvstore.checkpoint.reader import CheckpointReader
from kvstore.checkpoint.tensors import FileRecord, TensorHeader, require_names, write_tensors
from kvstore.checkpoint.verify import verify
from kvstore.errors import CheckpointError
from kvstore.table import TableSpec
from kvstore.values import to_buffer

_RENAME = "give one of the keys another name"


def export(folder: Path, path: Path, store: int = 0, states: bool = False) -> FileRecord:
    """Write the arrays of a checkpoint to ``path``, verified, one in memory at a time.

    ``safetensors.torch.load_file(path)`` gives a ``state_dict``: of a ``Trainer``'s store, by the names of the
    parameters, also of those with sparse gradients. Buffers of a model, such as batch statistics, are not in a store.
    A table with a shape is one array; one that grows is its rows, by the key's name, and ``<key>.ids``.

    Args:
        folder: of the checkpoint.
        path: the file to write.
        store: which of the job's stores, from 0.
        states: also write the optimizer's states, as ``<name of the array>.<name of the state>``.

    Raises:
        CheckpointError: the checkpoint is damaged, or has no such store; or two of its tensors would have the same name
            in the file, which is then not written.
        OSError: ``path`` cannot be written.
    """
    manifest = verify(folder)
    if store >= len(manifest.stores):
        raise CheckpointError(f"{folder}: no store {store}: it has {len(manifest.stores)}, numbered from 0")
    specs = manifest.stores[store].specs
    moved = {spec.table.parameter for spec in specs.values() if isinstance(spec, TableSpec)}  # arrays that are stale
    arrays = {key: spec for key, spec in specs.items() if not isinstance(spec, TableSpec) and key not in moved}
    with CheckpointReader(folder) as reader:
        headers = [TensorHeader(str(key), spec.dtype, spec.shape) for key, spec in arrays.items()]
        named = reader.states(store, arrays) if states else {}
        headers += [TensorHeader.of(f"{key}.{name}", value) for (key, name), value in named.items()]
        tables = [
            ExportedTable(reader, store, key, spec.table, states)
            for key, spec in specs.items()
            if isinstance(spec, TableSpec)
        ]
        known = [(str(key), f"array {key!r}") for key in arrays]
        known += [(f"{key}.{name}", f"state {name!r} of array {key!r}") for key, name in named]
        known += [part for table in tables for part in table.names()]
        require_names(path, known, "leave out the states, or give one of the keys another name" if states else _RENAME)
        headers += [header for table in tables for header in table.headers()]

        def contents() -> Iterator[memoryview]:
            for key in arrays:
                yield to_buffer(reader.value(store, key).contiguous())
            for value in named.values():
                yield to_buffer(value.contiguous())
            for table in tables:
                yield from table.contents()

        return write_tensors(path, headers, contents(), {"format": "pt"})
