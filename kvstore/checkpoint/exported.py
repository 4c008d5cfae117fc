"""A checkpoint as plain tensors by name: for the file that ``kvstore-checkpoint export`` writes, and for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from kvstore.checkpoint.checkpoint_reader import CheckpointReader, verify
from kvstore.checkpoint.tensors import DTYPES, TensorHeader, require_names, write_tensors
from kvstore.errors import CheckpointError
from kvstore.optim.states import StateTensors
from kvstore.rows.halves import array_dtype
from kvstore.rows.open_table import whole_pages
from kvstore.rows.row_sparse import RowSparse
from kvstore.rows.stripe import STATE
from kvstore.sealed_folders import FileRecord
from kvstore.spec import Key, Spec
from kvstore.table import Table, TableSpec
from kvstore.values import from_buffer, to_buffer

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

    def values(self) -> dict[str, torch.Tensor | RowSparse]:
        """Return the tensors by their names; of a table that grows, its rows with their ids."""
        made: dict[str, Any] = {
            header.name: from_buffer(content, header.dtype).view(tuple(header.shape))
            for header, content in zip(self.headers(), self.contents(), strict=True)
        }
        if not self._whole:
            key = str(self._key)
            made[key] = RowSparse(made.pop(f"{key}.ids"), made[key])
        return made

    def _sorted(self, parts: Sequence[Any]) -> Any:
        if not parts:
            return np.empty(0)
        order = np.argsort(np.concatenate([page.ids for page in self._pages]))
        return np.concatenate(parts)[order]

    def _rows(self) -> Any:
        table, count = self._table, self._table.rows or 0
        rows = np.empty((count, table.width), array_dtype(table.dtype))
        for page in whole_pages(table, self._pages, PAGE_ROWS):
            rows[page.ids] = page.rows
        return rows

    @staticmethod
    def _bytes(array: Any) -> memoryview:
        view: memoryview = np.ascontiguousarray(array).data if array.size else memoryview(b"")
        return view.cast("B")


class Exported(NamedTuple):
    """What of a store of a checkpoint gets a name."""

    arrays: dict[Key, Spec]
    states: StateTensors
    tables: list[ExportedTable]

    @classmethod
    def of(cls, reader: CheckpointReader, store: int, states: bool, failed: str) -> Exported:
        """Return it. Raises ``CheckpointError`` if there is no such store, or if two names are the same."""
        stores = reader.manifest.stores
        if not 0 <= store < len(stores):
            raise CheckpointError(f"{reader.folder}: no store {store}: it has {len(stores)}, numbered from 0")
        specs = stores[store].specs
        moved = {
            spec.table.parameter for spec in specs.values() if isinstance(spec, TableSpec)
        }  # arrays that are stale
        arrays = {key: spec for key, spec in specs.items() if not isinstance(spec, TableSpec) and key not in moved}
        named = reader.states(store, arrays) if states else {}
        tables = [
            ExportedTable(reader, store, key, spec.table, states)
            for key, spec in specs.items()
            if isinstance(spec, TableSpec)
        ]
        known = [(str(key), f"array {key!r}") for key in arrays]
        known += [(f"{key}.{name}", f"state {name!r} of array {key!r}") for key, name in named]
        known += [part for table in tables for part in table.names()]
        require_names(
            failed, known, "leave out the states, or give one of the keys another name" if states else _RENAME
        )
        return cls(arrays, named, tables)


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
    verify(folder)
    with CheckpointReader(folder) as reader:
        exported = Exported.of(reader, store, states, f"{path} is not written")
        headers = [TensorHeader(str(key), spec.dtype, spec.shape) for key, spec in exported.arrays.items()]
        headers += [TensorHeader.of(f"{key}.{name}", value) for (key, name), value in exported.states.items()]
        headers += [header for table in exported.tables for header in table.headers()]

        def contents() -> Iterator[memoryview]:
            for key in exported.arrays:
                yield to_buffer(reader.value(store, key).contiguous())
            for value in exported.states.values():
                yield to_buffer(value.contiguous())
            for table in exported.tables:
                yield from table.contents()

        return write_tensors(path, headers, contents(), {"format": "pt"})
