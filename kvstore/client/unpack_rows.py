"""The rows that come back from servers, until all are there and are written where the call wants them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from kvstore import wire
from kvstore.client.pack_rows import RowBlock, Striped
from kvstore.client.plans import RowParcel, RowPlan
from kvstore.errors import WireError
from kvstore.rows.ids import Ids
from kvstore.rows.layout import read_rows
from kvstore.rows.row_arguments import Wanted
from kvstore.rows.slabs import Array, scatter, scatter_whole
from kvstore.rows.sums import Rows


class IncomingRows:
    """Takes rows by their ids.

    Args:
        striped: the ids.
        rows: of each table the memory that they are written into, of shape (n, width).
        block: the array that has all of it, if it lies in one.
        wanted: what is written when all are there; of each table, or empty.
    """

    union = False

    def __init__(
        self,
        plan: RowPlan,
        striped: Striped,
        rows: Sequence[Rows],
        block: RowBlock | None = None,
        wanted: Sequence[Wanted] = (),
    ) -> None:
        self._plan = plan
        self._striped = striped
        self._rows = rows
        self._block = block
        self._wanted = wanted
        self._items: list[Array] | None = None  # the rows as single items
        self._missing = set(self.servers)

    @classmethod
    def of(cls, plan: RowPlan, wanted: Sequence[Wanted]) -> IncomingRows:
        striped = Striped(plan, [each.ids for each in wanted])
        return cls(plan, striped, [each.destination() for each in wanted], wanted=wanted)

    @property
    def servers(self) -> list[int]:
        """The servers that have rows of these; one of them, if no rows are wanted."""
        return [server for server in range(self._plan.servers) if self._striped.total(server)] or [0]

    def counts(self, server: int) -> list[int]:
        return self._striped.counts[server]

    def ids(self, server: int) -> Ids:
        return self._striped.ids(server)

    def nbytes(self, server: int) -> int:
        return self._plan.nbytes(self.counts(server))

    def take(self, parcel: RowParcel, reply: wire.Rows) -> None:
        """Take what a server has answered. May be called again with the same answer."""
        if reply.counts != self.counts(parcel.server):
            raise WireError(f"expected {self.counts(parcel.server)} rows of the tables, got {reply.counts}")
        self._collect(parcel.server, reply)
        self._missing.discard(parcel.server)
        if self._wanted and not self._missing:
            for wanted, rows in zip(self._wanted, self._rows, strict=True):
                wanted.write(rows)

    def _collect(self, server: int, reply: wire.Rows) -> None:
        """Put the rows of a reply where they belong among all."""
        item = self._plan.item
        if item is None:
            parts = row_parts(self._plan, reply)
            for rows, where, part in zip(self._rows, self._striped.positions(server), parts, strict=True):
                if len(where):
                    scatter(rows, where, part)
            return
        count = sum(reply.counts)
        if len(reply.buffers) != 1 or len(reply.buffers[0]) != count * item.itemsize:
            raise WireError(f"expected {count} rows of {item.itemsize} bytes, got {sum(map(len, reply.buffers))} bytes")
        if not count:
            return
        came = np.frombuffer(reply.buffers[0], item)
        if self._items is None:
            arrays = self._rows if self._block is None else [self._block.rows]
            self._items = [rows.view(item)[:, 0] for rows in arrays]
        if self._block is None:
            places = self._striped.positions(server)
        else:
            places = [self._striped.rows_in(self._block.firsts, server)]
        at = 0
        for items, where in zip(self._items, places, strict=True):
            if len(where):
                scatter_whole(items, where, came[at : at + len(where)])
                at += len(where)


class UnionRows:
    """Takes all rows that the updates of a round have changed, and their ids.

    Args:
        wanted: of each table: what becomes these rows.
    """

    union = True

    def __init__(self, plan: RowPlan, wanted: Sequence[Wanted]) -> None:
        self._plan = plan
        self._wanted = wanted
        self._parts: dict[int, list[tuple[Ids, Rows]]] = {}  # by server, of each table

    @property
    def servers(self) -> list[int]:
        return list(range(self._plan.servers))

    def counts(self, server: int) -> list[int]:
        return [0] * len(self._plan.tables)

    def ids(self, server: int) -> Ids:
        return np.zeros(0, np.int64 if self._plan.wide else np.int32)

    def nbytes(self, server: int) -> int:
        return 0

    def take(self, parcel: RowParcel, reply: wire.Rows) -> None:
        """Take what a server has answered. May be called again with the same answer."""
        if len(reply.counts) != len(self._plan.tables) or len(reply.buffers) != 2:
            raise WireError(f"expected rows and ids of {len(self._plan.tables)} tables, got others")
        dtype = np.dtype(np.int64 if reply.wide else np.int32)
        if len(reply.buffers[1]) != sum(reply.counts) * dtype.itemsize:
            raise WireError(f"expected {sum(reply.counts)} ids, got {len(reply.buffers[1])} bytes")
        ids = np.frombuffer(reply.buffers[1], dtype).astype(np.int64)
        at, taken = 0, []
        for count, part in zip(reply.counts, row_parts(self._plan, reply), strict=True):
            taken.append((ids[at : at + count], part.copy()))  # the reply's memory is the server's
            at += count
        self._parts[parcel.server] = taken
        if len(self._parts) == self._plan.servers:
            for number, wanted in enumerate(self._wanted):
                wanted.write_changed(*self._united(number))

    def _united(self, number: int) -> tuple[Ids, Rows]:
        """Return the rows of the table at ``number``, by rising ids."""
        parts = [self._parts[server][number] for server in sorted(self._parts)]
        ids = np.concatenate([ids for ids, _ in parts])
        order = np.argsort(ids)
        return ids[order], np.concatenate([rows for _, rows in parts])[order]


RowReader: TypeAlias = IncomingRows | UnionRows


def row_parts(plan: RowPlan, reply: wire.Rows) -> list[Rows]:
    """Return the rows of each table that a reply brings."""
    lengths = plan.lengths(reply.counts)
    buffer: wire.Buffer = reply.buffers[0] if reply.buffers else b""
    if len(buffer) != sum(lengths):
        raise WireError(f"expected {sum(lengths)} bytes of rows, got {len(buffer)}")
    view, at, parts = memoryview(buffer), 0, []
    for table, count, length in zip(plan.tables, reply.counts, lengths, strict=True):
        parts.append(read_rows(view[at : at + length], count, table.width, table.dtype, table.codec))
        at += length
    return parts
