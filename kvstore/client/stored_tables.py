"""Whole tables on the servers: made, replaced row by row, read page by page, counted, evicted from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from kvstore import wire
from kvstore.client.entries import Segment
from kvstore.client.pack import sendable
from kvstore.client.plans import RowPlan
from kvstore.client.requests import Requests
from kvstore.errors import WireError
from kvstore.lineage import Version
from kvstore.member.outstanding import Question, ready
from kvstore.rows.frozen_rows import Page
from kvstore.rows.halves import array_dtype
from kvstore.rows.ids import Ids, stripes_of
from kvstore.rows.row_table import Part
from kvstore.rows.stripe import PartSpec
from kvstore.rows.sums import Positions, Rows
from kvstore.rows.table_files import FrozenState
from kvstore.spec import ITEMSIZE, Key
from kvstore.table import Table

PAGE = 8 << 20  # bytes of rows and of what belongs to them, in one message


READ_PAGE = 4 << 20  # bytes of rows, and of what belongs to them, that a server is asked for at a time


class TableReading:
    """A table as it was at one moment, read page by page from all servers while training goes on.

    In a ``with`` block, whose end lets the servers go on without keeping anything.
    """

    def __init__(self, requests: Requests, table: Table, stripes: Sequence[wire.Frozen]) -> None:
        self.stripes = stripes
        # why all rows are read, though only changes were asked for; empty if it is what was asked for
        self.whole = next((frozen.whole for frozen in stripes if frozen.whole), "")
        self._requests = requests
        self._table = table

    def __enter__(self) -> TableReading:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        client = self._requests.session.client
        if client.over:
            return  # a loop that an error has ended is closed late: servers have forgotten this worker, and no one asks
        operation = self._requests.operation("reading a table")
        questions = [
            Question(peer, operation, wire.Thaw, {"store": self._requests.store, "number": frozen.number})
            for peer, frozen in zip(self._requests.session.servers, self.stripes, strict=True)
        ]
        client.submit(operation, ready, questions)

    @property
    def steps(self) -> int:
        """How many updates the optimizer had made; where the stripes differ, the most."""
        return max(frozen.steps for frozen in self.stripes)

    def state(self, rule: str | None) -> FrozenState:
        first = self.stripes[0]
        parts = {
            name: PartSpec(dtype, columns)
            for name, dtype, columns in zip(first.names, first.dtypes, first.columns, strict=True)
        }
        versions = [Version(*frozen.at) for frozen in self.stripes]
        return FrozenState(versions, [frozen.steps for frozen in self.stripes], parts, rule, self.whole)

    def pages(self, state: bool = True) -> Iterator[Page]:
        """Yield all rows, some of one server's at a time; stripes take turns."""
        row = self._table.row_bytes + 8
        counts = []
        for frozen in self.stripes:
            parts = zip(frozen.dtypes, frozen.columns, strict=True) if state else ()
            counts.append(
                max(1, READ_PAGE // (row + sum(ITEMSIZE[dtype] * max(1, columns) for dtype, columns in parts)))
            )
        slots = [frozen.slots for frozen in self.stripes]
        for server, reply in self._read(slots, counts, gone=False, state=state):
            page = self._page(self.stripes[server], reply, state)
            if len(page.ids):
                yield page

    def gone_pages(self) -> Iterator[Ids]:
        """Yield the ids of all rows that have gone since the version that the reading began at."""
        counts = [READ_PAGE // 8] * len(self.stripes)
        for _, reply in self._read([frozen.gone for frozen in self.stripes], counts, gone=True, state=False):
            yield _array(reply.buffers[0], "int64", reply.count, 0)

    def _read(
        self, lengths: Sequence[int], counts: Sequence[int], gone: bool, state: bool
    ) -> Iterator[tuple[int, wire.FrozenPage]]:
        """Yield the pages of all servers; each server is asked for so many of its so many rows at a time."""
        starts = [0] * len(lengths)
        while any(start < length for start, length in zip(starts, lengths, strict=True)):
            by_server = {}
            for server, (start, length, count) in enumerate(zip(starts, lengths, counts, strict=True)):
                if start < length:
                    asked = min(count, length - start)
                    fields = {"start": start, "count": asked, "gone": gone, "state": state}
                    by_server[server] = {"number": self.stripes[server].number, **fields}
                    starts[server] += count
            yield from self._requests.each("reading a table", (), wire.ReadFrozen, by_server).items()

    def _page(self, frozen: wire.Frozen, reply: wire.FrozenPage, state: bool) -> Page:
        """Return what a reply brings, as a copy: its memory is the server's."""
        names = frozen.names if state else []
        if len(reply.buffers) != 2 + len(names):
            raise WireError(f"expected {2 + len(names)} buffers of a page of rows, got {len(reply.buffers)}")
        ids, rows, *parts = reply.buffers
        described = zip(names, frozen.dtypes, frozen.columns, parts, strict=False)
        return Page(
            _array(ids, "int64", reply.count, 0),
            _array(rows, self._table.dtype, reply.count, self._table.width),
            {name: _array(part, dtype, reply.count, columns) for name, dtype, columns, part in described},
        )


def _array(buffer: wire.Buffer, dtype: str, count: int, columns: int) -> Any:
    """Return a copy of ``buffer`` as ``count`` rows of so many columns; with 0, of one dimension."""
    if len(buffer) != count * max(1, columns) * ITEMSIZE[dtype]:
        raise WireError(f"expected {count} rows of {max(1, columns)} {dtype}, got {len(buffer)} bytes")
    flat = np.frombuffer(buffer, array_dtype(dtype)).copy()
    return flat.reshape(count, columns) if columns else flat


class StoredRows(NamedTuple):
    """Rows that replace those that are there."""

    ids: Ids  # each once
    rows: Rows  # of shape (ids, width)
    parts: Mapping[str, Part] = {}  # what belongs to each row beside its values, by name; what is missing begins anew
    version: int | None = None  # how many updates the table has had; None leaves that as it is
    steps: int | None = None  # how many of them its optimizer has made; likewise


class StoredTables:
    """The tables of one store, as a whole."""

    def __init__(self, requests: Requests, tables: Mapping[Key, Table]) -> None:
        self._requests = requests
        self._tables = tables

    def make(self, plan: RowPlan, rows: Mapping[Key, tuple[Ids, Rows]]) -> None:
        """Have the servers make new tables, and give them the rows that some begin with."""
        described = [table.described for table in plan.tables]
        fields = {"keys": list(plan.keys), "tables": described, "stripes": plan.servers}
        by_server = {parcel.server: {"ids": parcel.ids, "stripe": parcel.server, **fields} for parcel in plan.parcels}
        self._requests.each("init", plan.keys, wire.InitTables, by_server)
        for key, first in rows.items():
            self.put("init", plan, key, StoredRows(*first))

    def put(self, what: str, plan: RowPlan, key: Key, given: StoredRows) -> None:
        """Replace rows of a table, some with each message, and wait until all are there."""
        number = plan.keys.index(key)
        table = plan.tables[number]
        parts = sum(part.dtype.itemsize * int(np.prod(part.shape[1:])) for part in given.parts.values())
        stripes = stripes_of(table, given.ids, plan.servers)
        everywhere = given.version is not None or given.steps is not None
        for page in self._pages(stripes, plan.servers, max(1, PAGE // (table.row_bytes + 8 + parts)), everywhere):
            operation = self._requests.operation(what, [key])
            pages = []
            for server, positions in page:
                fields = partial(self._replaced, plan.parcels[server].ids[number], given, positions)
                pages.append(_PutOfRows(self._requests.session.servers[server], operation, wire.PutRows, fields))
            self._requests.session.client.exchange(operation, ready, pages)

    def _replaced(self, number: int, given: StoredRows, positions: Positions) -> dict[str, Any]:
        """Return the fields of the message with the rows of ``given`` at ``positions``, as a copy."""
        ids, rows, parts, version, steps = given
        memory = self._requests.session.client
        return {
            "store": self._requests.store,
            "id": number,
            "count": len(positions),
            "version": version,
            "steps": steps,
            "names": list(parts),
            "dtypes": [str(part.dtype) for part in parts.values()],
            "columns": [part.shape[1] if part.ndim > 1 else 0 for part in parts.values()],
            "buffers": [sendable(array[positions], memory) for array in (ids, rows, *parts.values())],
        }

    def put_rest(self, what: str, plan: RowPlan, key: Key, rests: Sequence[Mapping[str, Part]]) -> None:
        """Have each server's stripe of a table go on as the one whose ``RowTable.rest`` is given, after its rows."""
        number = plan.keys.index(key)
        memory = self._requests.session.client
        by_server = {
            parcel.server: {
                "id": parcel.ids[number],
                "names": list(rest),
                "buffers": [sendable(np.ascontiguousarray(part, np.int64), memory) for part in rest.values()],
            }
            for parcel, rest in zip(plan.parcels, rests, strict=True)
        }
        self._requests.each(what, [key], wire.PutTableRest, by_server)

    @staticmethod
    def _pages(
        stripes: Positions, servers: int, most: int, everywhere: bool
    ) -> Iterator[Sequence[tuple[int, Positions]]]:
        """Yield for one message to each server where its next rows are, as long as some server has more.

        Args:
            stripes: the server of each row.
            servers: how many there are.
            most: rows of one message.
            everywhere: have a first message for each server, even without rows.
        """
        of = [np.flatnonzero(stripes == server) for server in range(servers)]
        if everywhere:
            yield [(server, positions[:most]) for server, positions in enumerate(of)]
        for start in range(most if everywhere else 0, max(map(len, of)), most):
            page = [positions[start : start + most] for positions in of]
            yield [(server, positions) for server, positions in enumerate(page) if len(positions)]

    def statistics(self, segments: Sequence[Segment]) -> dict[str, int]:
        """Return the sums of the servers' statistics of a table; ``version`` is the highest."""
        totals: dict[str, int] = {}
        by_server = {segment.server: {"id": segment.id} for segment in segments}
        replies = self._requests.each("table_statistics", [segments[0].key], wire.DescribeTable, by_server)
        for reply in replies.values():
            for name, count in zip(reply.names, reply.counts, strict=True):
                before = totals.get(name, 0)
                totals[name] = max(before, count) if name == "version" else before + count
        return totals

    def freeze(self, segments: Sequence[Segment], clock: int, since: Sequence[Version] | None = None) -> TableReading:
        """Have the servers keep a table as it is once the round ``clock`` is over, and return what reads it."""
        reading = self._freeze(segments, clock, since)
        if not reading.whole or all(frozen.whole for frozen in reading.stripes):
            return reading
        with reading:  # the rows that have gone on the other servers would be missing in changes, and come back
            whole = self._freeze(segments, clock, None)
        whole.whole = reading.whole
        return whole

    def _freeze(self, segments: Sequence[Segment], clock: int, since: Sequence[Version] | None) -> TableReading:
        by_server = {
            segment.server: {
                "id": segment.id,
                "clock": clock,
                "since": None if since is None else since[segment.server],
            }
            for segment in segments
        }
        frozen = self._requests.each("reading a table", [segments[0].key], wire.FreezeTable, by_server)
        table = self._tables[segments[0].key]
        return TableReading(self._requests, table, [frozen[server] for server in sorted(frozen)])

    def evict(self, segments: Sequence[Segment], clock: int) -> None:
        """Have the servers let rows of a table go, once the round ``clock`` is over."""
        by_server = {segment.server: {"id": segment.id, "clock": clock} for segment in segments}
        self._requests.each("evict", [segments[0].key], wire.EvictRows, by_server)


class _PutOfRows(Question):
    """Some rows, which are copied when the message goes: those of all servers need not be in memory at once."""

    __slots__ = ()
    early = False
