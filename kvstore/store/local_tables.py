"""The tables of a store in one process: their rows are summed and updated here, on the CPU."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from kvstore.errors import UsageError, WeightsInDoubt
from kvstore.lineage import Version, new_lineage
from kvstore.optim.optimizer import Optimizer
from kvstore.optim.updater import RowHyperparameters, RowUpdater
from kvstore.rows.frozen_rows import FrozenRows, Page
from kvstore.rows.halves import array_dtype, array_of_rows, narrowed
from kvstore.rows.ids import Ids
from kvstore.rows.row_arguments import Wanted, contribution, first_rows, given_rows, name_of, row_sparse, sparse_of
from kvstore.rows.row_sparse import RowSparse
from kvstore.rows.row_table import RowStates, RowTable
from kvstore.rows.saving import FrozenReading, OpenSaves, load_table, save_table
from kvstore.rows.sums import Rows
from kvstore.rows.table_files import FrozenState
from kvstore.spec import Key
from kvstore.store.base import TableChanges
from kvstore.store.wanted_rows import described
from kvstore.table import Table
from kvstore.ticket import Ticket

PAGE_ROWS = 1 << 14

Function = Callable[[Key, Any, Any], None]


class LocalTables:
    """All tables of one store.

    Args:
        finite: refuse rows that are not finite.
    """

    def __init__(self, finite: bool) -> None:
        self._finite = finite
        self._tables: dict[Key, RowTable] = {}
        self._updaters: dict[Key, RowUpdater] = {}
        self._optimizer: Optimizer | None = None
        self._saves = OpenSaves()
        self.specs: dict[Key, Table] = {}  # what each table is
        self.moved: dict[Key, Key] = {}  # by the key of an array, the key of the table that has its rows now
        self.changes: dict[Key, TableChanges] = {}  # see ``KVStore.table_changes``

    def __contains__(self, key: Key) -> bool:
        return key in self.specs

    def __len__(self) -> int:
        return len(self.specs)

    def add(self, values: Mapping[Key, Any]) -> None:
        """Make tables: all, or none if an exception is raised."""
        firsts = {key: first_rows(described("init", name_of(key, value), 0), value) for key, value in values.items()}
        specs = {key: table for key, (table, _) in firsts.items()}
        updaters = {} if self._optimizer is None else row_updaters(self._optimizer, specs)
        made = {key: RowTable(table, lineage=new_lineage()) for key, table in specs.items()}
        for key, rows in made.items():
            rows.use(updaters.get(key))
            if (first := firsts[key][1]) is not None:
                rows.put(*first, {}, None)
        self.specs |= specs
        self.moved |= {table.parameter: key for key, table in specs.items() if table.parameter is not None}
        self.changes |= dict.fromkeys(specs, TableChanges(0, 0))
        self._tables |= made
        self._updaters |= updaters

    def resolved(self, by_key: dict[Key, Any]) -> dict[Key, Any]:
        moved = self.moved
        return {moved.get(key, key): value for key, value in by_key.items()} if moved else by_key

    def require(self, optimizer: Optimizer) -> None:
        row_updaters(optimizer, self.specs)

    def use(self, optimizer: Optimizer | None) -> None:
        """Update with ``optimizer`` from now on; states of another rule are dropped. None assigns."""
        updaters = {} if optimizer is None else row_updaters(optimizer, self.specs)
        self._optimizer = optimizer
        self._updaters = updaters
        for key, rows in self._tables.items():
            rows.use(updaters.get(key))

    def contribution(self, key: Key, values: list[Any]) -> tuple[Ids, Rows]:
        return contribution(described("push", self.specs[key].name(key), 0), self.specs[key], values, self._finite)

    def update(self, key: Key, ids: Ids, sums: Rows, hyper: RowHyperparameters, function: Function | None) -> Ids:
        """Make one update of a table; return the ids of the rows that have changed."""
        rows = self._tables[key]
        self._changed(key)
        if function is not None:
            return rows.update(ids, self._called(function, key, ids, sums), None)
        updater = self._updaters.get(key)
        if updater is not None and sums.base is not None:  # perhaps the caller's memory
            sums = sums.copy()
        version = rows.version
        try:
            return rows.update(ids, sums, updater, hyper)
        except Exception as exc:
            if rows.version == version and (updater is None or updater.lazy):
                raise
            name = self.specs[key].name(key)
            text = f"an update of {name!r} failed in the middle, and may be half made: {type(exc).__name__}: {exc}"
            raise WeightsInDoubt(text, [key]) from exc

    def pull(self, key: Key, wanted: Wanted, changed: Ids | None = None) -> None:
        """Write the rows that are wanted."""
        wanted.write(self.rows(key, wanted.ids))
        if wanted.changed and changed is not None:
            wanted.write_changed(changed, self.rows(key, changed))

    def rows(self, key: Key, ids: Ids) -> Rows:
        table = self.specs[key]
        out: Rows = np.empty((len(ids), table.width), array_dtype(table.dtype))
        self._tables[key].pull(ids, out)
        return out

    def whole(self, key: Key, targets: list[Any]) -> Callable[[], None]:
        """Return what writes all rows of a table with a shape into each of ``targets``, arrays or ``RowSparse``."""
        table = self.specs[key]
        if table.rows is None:
            raise UsageError(f"key {key!r} is {table}, which has no last row; use row_sparse_pull, or table_rows")
        wanted = Wanted(described("pull", table.name(key), 0), table)
        ids = np.arange(table.rows)
        for target in targets:
            wanted.add(ids, target)
        return lambda: self.pull(key, wanted)

    def put(self, key: Key, value: Any) -> None:
        table = self.specs[key]
        self._changed(key)
        self._tables[key].put(*given_rows(described("put_rows", table.name(key), 0), table, value), {}, None)

    def pages(self, key: Key) -> Iterator[RowSparse]:
        frozen = self._tables[key].freeze()
        pages = self._pages(key, frozen)
        weakref.finalize(pages, frozen.thaw)  # nobody may ever ask for the first page
        return pages

    def states(self) -> dict[tuple[Key, str], torch.Tensor]:
        states: dict[tuple[Key, str], torch.Tensor] = {}
        for key in self._tables:
            of_key = RowStates.of(*self._frozen(key)).tensors()
            states |= {(key, name): value for name, value in of_key.items()}
        return states

    def require_keys(self, states: Mapping[Key, RowStates], where: object) -> None:
        """Raise ``UsageError`` unless all keys with ``states``, which come from ``where``, have such tables."""
        for key, of_key in states.items():
            if key not in self.specs:
                raise UsageError(f"{where} holds states of table {key!r}, which has not been initialized")
            of_key.require(self._tables[key].parts, key, where)

    def load_states(self, states: Mapping[Key, RowStates]) -> None:
        """Take the states of rows. In tables that grow, only rows that are there take them."""
        for key, of_key in states.items():
            pages = self._frozen(key)[0]
            for page in of_key.replaced(pages, self.specs[key].grows, partial(self.rows, key)):
                self._tables[key].put(*page, None, of_key.steps)

    def _frozen(self, key: Key) -> tuple[list[Page], int]:
        """Return all rows of a table, with their states, and how many updates its optimizer has made."""
        frozen = self._tables[key].freeze()
        pages = list(frozen.pages(PAGE_ROWS))
        frozen.thaw()
        return pages, frozen.steps

    def save(self, key: Key, path: str | os.PathLike[str], state: bool, since: int | None, wait: bool) -> Ticket:
        rows, updater = self._tables[key], self._updaters.get(key)

        def freeze(versions: Sequence[Version] | None) -> tuple[FrozenReading, FrozenState]:
            whole = "" if versions is None else rows.unknown(versions[0])
            frozen = rows.freeze(None if versions is None or whole else versions[0])
            rule = None if updater is None else updater.rule
            return FrozenReading([frozen]), FrozenState([frozen.at], [frozen.steps], rows.parts, rule, whole)

        return save_table(path, self.specs[key].name(key), self.specs[key], 1, since, state, freeze, wait, self._saves)

    def load(self, key: Key, path: str | os.PathLike[str]) -> None:
        rows, updater = self._tables[key], self._updaters.get(key)

        def put(page: Page, version: int, steps: int) -> None:
            rows.put(*page, version, steps)

        self._changed(key, loads=1)
        load_table(path, key, self.specs[key], None if updater is None else updater.rule, put)

    def evict(self, key: Key) -> None:
        self._changed(key)
        self._tables[key].evict()

    def statistics(self, key: Key) -> dict[str, int]:
        return self._tables[key].statistics()

    def _changed(self, key: Key, loads: int = 0) -> None:
        before = self.changes[key]
        self.changes[key] = TableChanges(before.changes + 1, before.loads + loads)

    def _called(self, function: Function, key: Key, ids: Ids, sums: Rows) -> Rows:
        """Return the rows of ``ids`` as the user's updater leaves them."""
        table = self.specs[key]
        pushed, stored = (sparse_of(table, ids, each) for each in (narrowed(sums, table.dtype), self.rows(key, ids)))
        function(key, pushed, stored)
        rows = row_sparse(f"the updater's rows of key {key!r}", stored, table).rows
        return array_of_rows(rows.reshape(sums.shape).contiguous())

    def _pages(self, key: Key, frozen: FrozenRows) -> Iterator[RowSparse]:
        try:
            for page in frozen.pages(PAGE_ROWS, state=False):
                yield sparse_of(self.specs[key], page.ids, page.rows)
        finally:
            frozen.thaw()


def row_updaters(optimizer: Optimizer, tables: Mapping[Key, Table]) -> dict[Key, RowUpdater]:
    """Return what updates the rows of each of ``tables`` with ``optimizer``."""
    return {
        key: RowUpdater(optimizer, table.name(key), table.dtype, table.width, table.grows)
        for key, table in tables.items()
    }
