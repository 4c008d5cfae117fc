"""The calls of a store that are about tables alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from kvstore.client.barriers import WorkerBarriers
from kvstore.client.calls import Arguments
from kvstore.client.clocks import PushClocks
from kvstore.client.optimizer import Optimizing
from kvstore.client.plans.entries import Entries, Entry
from kvstore.client.rows.plan import RowPlans
from kvstore.client.rows.reading import TableReading
from kvstore.client.rows.stored import StoredRows, StoredTables
from kvstore.client.store_calls import StoreCalls
from kvstore.lineage import Version
from kvstore.rows.first_rows import given_rows
from kvstore.rows.frozen_rows import Page
from kvstore.rows.ids import Ids
from kvstore.rows.row_sparse import RowSparse
from kvstore.rows.saving import OpenSaves, load_table, save_table
from kvstore.rows.sums import Rows
from kvstore.rows.table_files import FrozenState
from kvstore.spec import Key, check_key
from kvstore.store.arguments import requests_of
from kvstore.store.table_interface import TableChanges, TableInterface
from kvstore.store.wanted_rows import described
from kvstore.ticket import Ticket

_UNCHANGED = TableChanges(0, 0)


class TableCalls(StoreCalls, TableInterface):
    """Has these calls; what they need is a ``DistStore``'s."""

    _arguments: Arguments
    _barriers: WorkerBarriers
    _clocks: PushClocks
    _entries: Entries
    _optimizing: Optimizing
    _row_plans: RowPlans
    _saves: OpenSaves
    _stored: StoredTables
    _table_changes: dict[Key, TableChanges]  # by calls other than pushes

    def row_sparse_pull(
        self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None, *, wait: bool = True
    ) -> Any:
        """See ``KVStore``."""
        self._check()
        requests = requests_of(key, out, row_ids)
        operation = self._pushes.make("row_sparse_pull", self._arguments.check_rows(key, requests), priority, wait)
        operation.result = requests.result()
        return operation.result if wait and out is None else Ticket(operation)

    def put_rows(self, key: Any, value: Any) -> None:
        """See ``KVStore``."""
        key = self._arguments.resolved(key)
        self._table(key)
        ids, rows = given_rows(
            described("put_rows", self._row_plans.require(key).name(key), self.rank),
            self._row_plans.require(key),
            value,
        )
        self._pushes.flush()
        self._note_change(key)
        if self.rank == 0:
            self._stored.put("put_rows", self._row_plans.of([key]), key, StoredRows(ids, rows))

    def table_rows(self, key: Any) -> Iterator[RowSparse]:
        """See ``KVStore``."""
        key = self._arguments.resolved(key)
        entry = self._table(key)
        return self._rows_of(key, self._stored.freeze(entry.segments, self._clock(entry)))

    def _rows_of(self, key: Any, reading: TableReading) -> Iterator[RowSparse]:
        table = self._row_plans.require(key)
        shape = None if table.rows is None else (table.rows, *table.row)
        with reading:
            for page in reading.pages(state=False):
                yield RowSparse(page.ids, page.rows.reshape(len(page.ids), *table.row), shape)

    def save_table(
        self,
        key: Any,
        dir: str | os.PathLike[str],
        state: bool = True,
        since: int | None = None,
        *,
        wait: bool = True,
    ) -> Ticket:
        """See ``KVStore``."""
        key = self._arguments.resolved(key)
        entry, table = self._table(key), self._row_plans.require(key)
        self._pushes.flush()

        def freeze(versions: Sequence[Version] | None) -> tuple[TableReading, FrozenState]:
            reading = self._stored.freeze(entry.segments, self._clock(entry), versions)
            return reading, reading.state(self._optimizing.rule())

        return save_table(dir, table.name(key), table, len(entry.segments), since, state, freeze, wait, self._saves)

    def load_table(self, key: Any, dir: str | os.PathLike[str]) -> None:
        """See ``KVStore``."""
        key = self._arguments.resolved(key)
        self._table(key)
        self._pushes.flush()
        self._note_change(key, loads=1)
        if self.rank == 0:
            plan = self._row_plans.of([key])

            def put(page: Page, version: int, steps: int) -> None:
                self._stored.put("load_table", plan, key, StoredRows(*page, version, steps))

            load_table(dir, key, self._row_plans.require(key), self._optimizing.rule(), put)

    def evict(self, key: Any) -> None:
        """See ``KVStore``."""
        key = self._arguments.resolved(key)
        keys = key if isinstance(key, list | tuple) else [key]
        entries = [self._table(each) for each in keys]
        self._pushes.flush()
        for each in keys:
            self._note_change(each)
        for entry in entries if self.rank == 0 else ():
            self._stored.evict(entry.segments, self._clock(entry))

    def table_statistics(self, key: Any) -> dict[str, int]:
        """See ``KVStore``."""
        key = self._arguments.resolved(key)
        return self._stored.statistics(self._table(key).segments)

    def table_changes(self, key: Any) -> TableChanges:
        """See ``KVStore``."""
        if key not in self._entries.tables:
            key = self._arguments.resolved(key)
            self._table(key)
        changes, loads = self._table_changes.get(key, _UNCHANGED)
        pushed = self._clocks.pushed[self._entries.places[key]]
        return TableChanges(int(pushed) + changes + self._barriers.passed, loads)

    # ---- helpers

    def _note_change(self, key: Key, loads: int = 0) -> None:
        before = self._table_changes.get(key, _UNCHANGED)
        self._table_changes[key] = TableChanges(before.changes + 1, before.loads + loads)

    def _table(self, key: Any) -> Entry:
        """Return what is known of the table of ``key``; raise what has gone wrong since the last call."""
        self._check()
        self._row_plans.require(check_key(key))
        return self._entries[key]

    def _row_array(self, key: Key, ids: Ids) -> Rows:
        """Return rows of a table, of shape (ids, width)."""
        rows: Rows = self.row_sparse_pull(key, row_ids=ids).view(len(ids), self._row_plans.require(key).width).numpy()
        return rows

    def _clock(self, entry: Entry) -> int:
        return int(self._clocks.pushed[entry.place])
