"""Rows of one table, as one call wants them: what servers are asked for, and where the answers go."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvstore.errors import UsageError
from kvstore.reading.held import HeldValue
from kvstore.reading.held_rows import HeldRows, RowsOfServer, reads_of_rows
from kvstore.reading.session import Ask
from kvstore.rows.wanted import Wanted
from kvstore.table import TableSpec
from kvstore.wire import ReadRows, RowsRead


class RowPull:
    """One table's part of a pull of rows.

    Args:
        value: the table.
        row_ids, out: see ``Reader.row_sparse_pull``.

    Raises:
        UsageError: the value is no table, or cannot have one of the ids.
        Mismatch: ``out`` does not fit.
    """

    def __init__(self, value: HeldValue, row_ids: Any, out: Any) -> None:
        self._value = value
        what = f"row_sparse_pull of key {value.key!r} by a reader"
        if not isinstance(value.spec, TableSpec):
            raise UsageError(f"{what}: it is {value.spec}, not a table; pull it")
        if row_ids is None:
            raise UsageError(f"{what}: row_ids is missing; pass the ids of rows")
        self._table = value.spec.table
        self._wanted = Wanted(what, self._table)
        self._out = self._wanted.add(row_ids, out)
        self._rows = self._wanted.destination()
        self._versions: set[int] = set()

    def asks(self, slack: int) -> list[Ask]:
        """Return what to ask the servers for."""
        value, ids, table = self._value, self._wanted.ids, self._table
        if slack and value.rows is None:
            value.rows = HeldRows(table)
        held = value.rows if slack else None
        versions = held.look_up(ids, self._rows) if held is not None and len(held) else None
        wide = table.rows is None or table.rows > 2**31
        numbers = {segment.server: segment.id for segment in value.segments}
        return [
            (
                read.server,
                ReadRows,
                {"store": value.store, "id": numbers[read.server], "slack": slack, **read.fields(wide)},
                partial(self._take, read, held),
            )
            for read in reads_of_rows(table, ids, versions, len(numbers))
        ]

    def _take(self, read: RowsOfServer, held: HeldRows | None, reply: RowsRead) -> None:
        self._versions.update(read.take(reply, self._rows, held))

    def result(self) -> Any:
        """Return the rows, written, and note of which rounds they are."""
        if self._versions:
            self._value.pulled = min(self._versions), max(self._versions)
        self._wanted.write(self._rows)
        return self._out
