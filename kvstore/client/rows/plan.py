"""What a list of tables is: where their stripes are, and how their rows travel. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from kvstore.client.plans.entries import Entries, Entry, Segment
from kvstore.errors import Mismatch
from kvstore.rows.layout import ALIGNED, part_bytes
from kvstore.spec import Key, without_value
from kvstore.table import Table
from kvstore.values.addresses import Column

KEPT = 1 << 10  # plans
NARROW = 2**31  # ids below this travel in 32 bits


class RowParcel:
    """The stripes of a list of tables that one server has: a message carries rows of these.

    Attributes:
        server: which one.
        ids: of the segments.
        places: of the tables, among the store's keys.
        segments: of each table, the one on this server.
        entries: what is known of each table.
    """

    def __init__(self, server: int, entries: Sequence[Entry]) -> None:
        self.server = server
        self.segments: list[Segment] = [entry.segments[server] for entry in entries]
        self.entries = list(entries)
        self.ids = [segment.id for segment in self.segments]
        self.places: Column = np.array([entry.place for entry in entries], np.int64)


class RowPlan:
    """What to do for a list of tables, each of which is listed once.

    Args:
        entries: what is known of them, and perhaps of others.
        keys: the list.

    Attributes:
        tables: what each is.
        shapes, dtypes: of each; None for the shape of one that grows.
        formats: of the elements of each, and the shape of its rows.
        grow: whether some of them grow.
        least, greatest: the ids that rows of each can have.
        places: of the tables, among the store's keys.
        servers: how many there are.
        parcels: for each server, the stripes that it has.
        wide: whether ids need more than 32 bits.
        codecs: how the rows of each travel.
        item: one row, if those of all tables are alike and lie back to back in messages, as they are; else None.
    """

    def __init__(self, entries: Entries, keys: Iterable[Key]) -> None:
        self.keys = tuple(keys)
        known = [entries[key] for key in self.keys]
        self.tables: list[Table] = [entries.tables[key] for key in self.keys]
        self.names = tuple(table.name(key) for table, key in zip(self.tables, self.keys, strict=True))
        self.shapes = [None if table.rows is None else (table.rows, *table.row) for table in self.tables]
        self.dtypes: list[torch.dtype] = [getattr(torch, table.dtype) for table in self.tables]
        self.formats = [(np.dtype(table.dtype), table.row) for table in self.tables]
        self.grow = any(table.grows for table in self.tables)
        every = np.iinfo(np.int64)
        self.least = np.array([every.min if table.rows is None else 0 for table in self.tables])
        self.greatest = np.array([every.max if table.rows is None else table.rows - 1 for table in self.tables])
        self.places: Column = np.array([entry.place for entry in known], np.int64)
        self.servers = len(known[0].segments)
        self.parcels = [RowParcel(server, known) for server in range(self.servers)]
        self.wide = any(table.rows is None or table.rows > NARROW for table in self.tables)
        self.codecs = [table.codec for table in self.tables]
        alike = {(table.dtype, table.width, table.codec) for table in self.tables}
        first = self.tables[0]
        whole = len(alike) == 1 and first.codec == "none" and first.row_bytes % ALIGNED == 0
        self.item = np.dtype((np.void, first.row_bytes)) if whole else None

    def lengths(self, counts: Sequence[int]) -> list[int]:
        """Return how many bytes so many rows of each table are in a message."""
        return [
            part_bytes(count, table.width, table.dtype, table.codec)
            for table, count in zip(self.tables, counts, strict=True)
        ]

    def nbytes(self, counts: Sequence[int]) -> int:
        """Return how many bytes so many rows of each table are in a message, all together."""
        return sum(self.lengths(counts)) if self.item is None else sum(counts) * self.item.itemsize


class RowPlans:
    """Makes plans of lists of tables, and keeps them.

    Args:
        entries: the store's keys, to which others are added later.
    """

    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._made: dict[tuple[Key, ...], RowPlan] = {}

    def of(self, keys: Iterable[Key]) -> RowPlan:
        """Return the plan of ``keys``, each of which is listed once.

        Raises:
            KeyNotInitialized: this worker does not know one of them.
            Mismatch: one of them is an array.
        """
        listed = tuple(keys)
        plan = self._made.get(listed)
        if plan is None:
            for key in listed:
                self.require(key)
            if len(self._made) >= KEPT:
                self._made.clear()
            plan = self._made[listed] = RowPlan(self._entries, listed)
        return plan

    def require(self, key: Key) -> Table:
        """Return the table of ``key``.

        Raises:
            KeyNotInitialized: this worker does not know the key.
            Mismatch: it is the key of an array.
        """
        table = self._entries.tables.get(key)
        if table is not None:
            return table
        if key not in self._entries:
            raise without_value(key, self._entries, " on this worker")
        raise Mismatch(
            f"key {key!r} is {self._entries[key].spec}, an array: push and pull it as one, or init it with kv.Table"
        )
