"""``kvstore-checkpoint``: list, verify and export the checkpoints of jobs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.checkpoint.checkpoint_reader import CheckpointReader, verify
from kvstore.checkpoint.folders import found, listed
from kvstore.checkpoint.manifest import load_manifest
from kvstore.checkpoint.tensors import DTYPES, TensorHeader, require_names, write_tensors
from kvstore.errors import CheckpointError, KVStoreError
from kvstore.rows.open_table import whole_pages
from kvstore.rows.stripe import STATE
from kvstore.sealed_folders import FileRecord
from kvstore.spec import Key
from kvstore.table import Table, TableSpec
from kvstore.values import to_buffer

_RENAME = "give one of the keys another name"

PAGE_ROWS = 1 << 16  # rows that no worker has pushed are made so many at a time


class ExportedTable:
    """The tensors of a table: its ids, sorted, its rows, and what the optimizer keeps of them.

    A table with a shape has all its rows: those that nobody has pushed are as they begin.
    """

    def __init__(self, reader: CheckpointReader, store: int, key: Key, table: Table, states: bool) -> None:
        self._table = table
        self._key = table.name(key)
        self._pages = list(reader.pages(store, key))  # mapped files, not memory
        ids = [page.ids for page in self._pages]
        self._ids = np.sort(np.concatenate([np.empty(0, np.int64), *ids]))
        kinds = [{name: (part.dtype.name, part.shape[1:]) for name, part in page.parts.items()} for page in self._pages]
        known = all(dtype in DTYPES for kind in kinds for dtype, _ in kind.values())
        if not known or any(kind != kinds[0] for kind in kinds):
            raise CheckpointError(f"{reader.folder}: damaged: the pages of table {key!r} do not have the same parts")
        self._whole = table.rows is not None
        self._states = (
            [name for name in self._pages[0].parts if name.startswith(STATE)] if states and self._pages else []
        )

    def headers(self) -> list[TensorHeader]:
        table, count = self._table, len(self._ids)
        shape = (table.rows if table.rows is not None else count, *table.row)
        headers = [TensorHeader(str(self._key), table.dtype, shape)]
        if not self._whole or self._states:
            headers.append(TensorHeader(f"{self._key}.ids", "int64", (count,)))
        for name in self._states:
            part = self._pages[0].parts[name]
            headers.append(
                TensorHeader(f"{self._key}.{name.removeprefix(STATE)}", part.dtype.name, (count, *part.shape[1:]))
            )
        return headers

    def names(self) -> list[tuple[str, str]]:
        rows, *others = [header.name for header in self.headers()]
        whose = f"table {self._key!r}"
        named = [(name, name.removeprefix(f"{rows}.")) for name in others]
        return [(rows, whose)] + [
            (name, f"the ids of {whose}" if what == "ids" else f"state {what!r} of {whose}") for name, what in named
        ]

    def contents(self) -> Iterator[memoryview]:
        yield self._bytes(self._rows() if self._whole else self._sorted([page.rows for page in self._pages]))
        if not self._whole or self._states:
            yield self._bytes(self._ids)
        for name in self._states:
            yield self._bytes(self._sorted([page.parts[name] for page in self._pages]))

    def _sorted(self, parts: Sequence[Any]) -> Any:
        if not parts:
            return np.empty(0)
        order = np.argsort(np.concatenate([page.ids for page in self._pages]))
        return np.concatenate(parts)[order]

    def _rows(self) -> Any:
        table, count = self._table, self._table.rows or 0
        rows = np.empty((count, table.width), table.dtype)
        for page in whole_pages(table, self._pages, PAGE_ROWS):
            rows[page.ids] = page.rows
        return rows

    @staticmethod
    def _bytes(array: Any) -> memoryview:
        view: memoryview = np.ascontiguousarray(array).data if array.size else memoryview(b"")
        return view.cast("B")


def export(folder: Path, path: Path, store: int = 0, states: bool = False) -> FileRecord:
    """Write the arrays of a checkpoint to ``path``, verified, one in memory at a time.

    ``safetensors.torch.load_file(path)`` gives a ``state_dict``: of a ``Trainer``'s store, by the names of the
    parameters, also of those with sparse gradients. Buffers of a model, such as batch statistics, are not in a store.
    A table with a shape is one array; one that grows is its rows, by the key's name, and ``<key>.ids``.

    Args:
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


def main(args: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(args)
    try:
        if given.command == "list":
            _list(given.directory)
        elif given.command == "verify":
            _verify(given.path)
        else:
            folder = _one(given.path)
            record = export(folder, given.out, given.store, given.states)
            print(f"{given.out}: {_size(record.nbytes)} from {folder}, sha256 {record.sha256}")
    except (KVStoreError, OSError) as exc:
        print(f"kvstore-checkpoint: {exc}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvstore-checkpoint", description="List, verify and export the checkpoints that jobs have written."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="list|verify|export")
    command = commands.add_parser("list", help="list the checkpoints in a directory")
    command.add_argument("directory", type=Path)
    command = commands.add_parser("verify", help="compare all files with their sha256")
    command.add_argument("path", type=Path, help="a checkpoint, or a directory whose checkpoints are all verified")
    command = commands.add_parser("export", help="write one plain safetensors file: arrays by name")
    command.add_argument("path", type=Path, help="a checkpoint, or a directory, for its newest one")
    command.add_argument("out", type=Path, help="the file to write")
    command.add_argument("--store", type=int, default=0, help="which of the job's stores (default: 0)")
    command.add_argument("--states", action="store_true", help="also the optimizer's states, as NAME.STATE")
    return parser


def _list(directory: Path) -> None:
    folders = listed(directory)
    if not folders:
        raise _nothing(directory)
    damaged = 0
    for folder in folders:
        if not folder.whole:
            print(f"{folder.path.name}  unfinished")
            continue
        try:
            manifest = load_manifest(folder.path)
        except CheckpointError as exc:
            print(f"{folder.path.name}  damaged: {exc}")
            damaged += 1
            continue
        optimizers = ", ".join(store.optimizer or "none" for store in manifest.stores)
        print(
            f"{folder.path.name}  {manifest.rounds} rounds  {_size(manifest.nbytes)}  {manifest.written}  "
            f"{manifest.num_workers} workers, {manifest.num_servers} servers  optimizer: {optimizers}"
        )
    if damaged:
        raise CheckpointError(f"{directory}: {damaged} of {len(folders)} are damaged")


def _verify(path: Path) -> None:
    folders = [folder.path for folder in listed(path) if folder.whole] or [_one(path)]
    errors = []
    for folder in folders:
        try:
            manifest = verify(folder)
        except CheckpointError as exc:
            errors.append(exc)
            print(f"{folder}: DAMAGED")
        else:
            print(f"{folder}: whole, {len(manifest.files)} files, {_size(manifest.nbytes)}")
    if errors:
        raise errors[0] if len(errors) == 1 else CheckpointError("\n".join(map(str, errors)))


def _one(path: Path) -> Path:
    folder = found(path)
    if folder is None:
        raise _nothing(path)
    return folder


def _nothing(path: Path) -> CheckpointError:
    return CheckpointError(f"{path}: no checkpoint there")


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:.1f} kB"


if __name__ == "__main__":
    sys.exit(main())
