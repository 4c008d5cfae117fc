"""Whole tables on the servers: made, replaced row by row, counted, evicted from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from kvstore import wire
from kvstore.client.plans.entries import Segment
from kvstore.client.requests import Requests
from kvstore.client.rows.pending import sendable
from kvstore.client.rows.plan import RowPlan
from kvstore.client.rows.reading import TableReading
from kvstore.lineage import Version
from kvstore.member.outstanding import PendingRequest, Question, ready
from kvstore.member.session import Session
from kvstore.rows.ids import Ids, stripes_of
from kvstore.rows.row_states import Part
from kvstore.rows.sums import Positions, Rows
from kvstore.spec import Key
from kvstore.table import Table
from kvstore.ticket import Operation
from kvstore.transport.memory import Memory

PAGE = 8 << 20  # bytes of rows and of what belongs to them, in one message


class StoredRows(NamedTuple):
    """Rows that replace those that are there.

    Attributes:
        ids: each once.
        rows: of shape (ids, width).
        parts: what belongs to each row beside its values, by name; what is missing begins anew.
        version: how many updates the table has had; None leaves that as it is.
        steps: how many of them its optimizer has made; likewise.
    """

    ids: Ids
    rows: Rows
    parts: Mapping[str, Part] = {}
    version: int | None = None
    steps: int | None = None


class StoredTables:
    """The tables of one store, as a whole.

    Args:
        session: this process's membership in the job.
        requests: the store's.
        tables: by key, to which others are added later.
    """

    def __init__(self, session: Session, requests: Requests, tables: Mapping[Key, Table]) -> None:
        self._session = session
        self._requests = requests
        self._tables = tables

    def make(self, plan: RowPlan, rows: Mapping[Key, tuple[Ids, Rows]]) -> None:
        """Have the servers make new tables, and give them the rows that some begin with."""
        described = [table.described for table in plan.tables]
        operation = self._requests.operation("init", plan.keys)
        questions = [
            Question(
                self._session.servers[parcel.server],
                operation,
                wire.InitTables,
                {
                    "store": self._requests.store,
                    "ids": parcel.ids,
                    "keys": list(plan.keys),
                    "tables": described,
                    "stripe": parcel.server,
                    "stripes": plan.servers,
                },
            )
            for parcel in plan.parcels
        ]
        self._session.client.exchange(operation, ready, questions)
        for key, first in rows.items():
            self.put("init", plan, key, StoredRows(*first))

    def put(self, what: str, plan: RowPlan, key: Key, given: StoredRows) -> None:
        """Replace rows of a table, some with each message, and wait until all are there.

        Args:
            what: the call, for messages.
            plan: of tables, one of which is that of ``key``.
            key: of the table.
            given: the rows.
        """
        number = plan.keys.index(key)
        table = plan.tables[number]
        parts = sum(part.dtype.itemsize * int(np.prod(part.shape[1:])) for part in given.parts.values())
        stripes = stripes_of(table, given.ids, plan.servers)
        everywhere = given.version is not None or given.steps is not None
        for page in self._pages(stripes, plan.servers, max(1, PAGE // (table.row_bytes + 8 + parts)), everywhere):
            operation = self._requests.operation(what, [key])
            pages: list[PendingRequest] = [
                _PutOfRows(
                    self._session.servers[server],
                    operation,
                    self._requests.store,
                    plan.parcels[server].ids[number],
                    given,
                    positions,
                    self._session.client,
                )
                for server, positions in page
            ]
            self._session.client.exchange(operation, ready, pages)

    def put_rest(self, what: str, plan: RowPlan, key: Key, rests: Sequence[Mapping[str, Part]]) -> None:
        """Have each server's stripe of a table go on as the one whose ``RowTable.rest`` is given, after its rows."""
        number = plan.keys.index(key)
        operation = self._requests.operation(what, [key])
        questions = [
            Question(
                self._session.servers[parcel.server],
                operation,
                wire.PutTableRest,
                {
                    "store": self._requests.store,
                    "id": parcel.ids[number],
                    "names": list(rest),
                    "buffers": [
                        sendable(np.ascontiguousarray(part, np.int64), self._session.client) for part in rest.values()
                    ],
                },
            )
            for parcel, rest in zip(plan.parcels, rests, strict=True)
        ]
        self._session.client.exchange(operation, ready, questions)

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
        for segment in segments:
            reply: wire.TableCounts = self._requests.one(
                self._session.servers[segment.server],
                "table_statistics",
                [segment.key],
                wire.DescribeTable,
                store=self._requests.store,
                id=segment.id,
            )
            for name, count in zip(reply.names, reply.counts, strict=True):
                before = totals.get(name, 0)
                totals[name] = max(before, count) if name == "version" else before + count
        return totals

    def freeze(self, segments: Sequence[Segment], clock: int, since: Sequence[Version] | None = None) -> TableReading:
        """Have the servers keep a table as it is once the round ``clock`` is over, and return what reads it.

        Args:
            segments: of the table, in the order of servers.
            clock: see above.
            since: only rows that have changed since the state of each stripe; None for all. All rows are read if a
                server does not know what has changed; see ``TableReading.whole``.
        """
        reading = self._freeze(segments, clock, since)
        if not reading.whole or all(frozen.whole for frozen in reading.stripes):
            return reading
        with reading:  # the rows that have gone on the other servers would be missing in changes, and come back
            whole = self._freeze(segments, clock, None)
        whole.whole = reading.whole
        return whole

    def _freeze(self, segments: Sequence[Segment], clock: int, since: Sequence[Version] | None) -> TableReading:
        operation = self._requests.operation("reading a table", [segments[0].key])
        frozen: dict[int, wire.Frozen] = {}
        questions = [
            Question(
                self._session.servers[segment.server],
                operation,
                wire.FreezeTable,
                {
                    "store": self._requests.store,
                    "id": segment.id,
                    "clock": clock,
                    "since": None if since is None else since[segment.server],
                },
                partial(frozen.__setitem__, segment.server),
            )
            for segment in segments
        ]
        self._session.client.exchange(operation, ready, questions)
        table = self._tables[segments[0].key]
        return TableReading(self._session, self._requests, table, [frozen[server] for server in sorted(frozen)])

    def evict(self, segments: Sequence[Segment], clock: int) -> None:
        """Have the servers let rows of a table go, once the round ``clock`` is over."""
        operation = self._requests.operation("evict", [segments[0].key])
        questions = [
            Question(
                self._session.servers[segment.server],
                operation,
                wire.EvictRows,
                {"store": self._requests.store, "id": segment.id, "clock": clock},
            )
            for segment in segments
        ]
        self._session.client.exchange(operation, ready, questions)


class _PutOfRows(PendingRequest):
    """Some rows of ``given``, those at ``positions``; they are copied when the message is made."""

    __slots__ = ("given", "id", "memory", "positions", "store")
    early = False

    def __init__(
        self,
        peer: bytes,
        operation: Operation,
        store: int,
        number: int,
        given: StoredRows,
        positions: Positions,
        memory: Memory,
    ) -> None:
        super().__init__(peer, operation)
        self.store, self.id, self.given, self.positions, self.memory = store, number, given, positions, memory

    def message(self, sender: wire.Sender) -> wire.PutRows:
        """See ``PendingRequest``."""
        ids, rows, parts, version, steps = self.given
        return wire.PutRows(
            sender,
            store=self.store,
            id=self.id,
            count=len(self.positions),
            version=version,
            steps=steps,
            names=list(parts),
            dtypes=[str(part.dtype) for part in parts.values()],
            columns=[part.shape[1] if part.ndim > 1 else 0 for part in parts.values()],
            buffers=[sendable(array[self.positions], self.memory) for array in (ids, rows, *parts.values())],
        )
