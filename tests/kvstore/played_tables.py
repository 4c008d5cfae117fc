"""Servers of tables that are functions: pushed rows replace those that are there, at once. See ``PlayedSession``."""

from __future__ import annotations

from typing import Any

import numpy as np
from played_session import PlayedSession

from kvstore import wire
from kvstore.client import DistStore
from kvstore.placement import place
from kvstore.rows.ids import stripes_of
from kvstore.rows.layout import part_bytes, read_rows, write_rows
from kvstore.rule import Rule
from kvstore.spec import Spec
from kvstore.table import Table, TableSpec


class PlayedTables:
    """See the module.

    Attributes:
        session, store: of worker 0, whose pushes are the only ones.
        rows: by segment and id.
        tables: by segment: the table, its stripe, and how many stripes there are.
    """

    def __init__(self, servers: int = 2, rule: Rule | None = None, aggregator: bool = False) -> None:
        self.session = PlayedSession(servers, self._answer, aggregator)
        self.rows: dict[tuple[int, int], np.ndarray[Any, Any]] = {}
        self.tables: dict[int, tuple[Table, int, int]] = {}
        self._arrays: dict[int, bytes] = {}
        self._next = 0
        self.store = DistStore(self.session, "dist_sync", rule)  # type: ignore[arg-type]
        self.session.asked.clear()

    def asked(self, kind: type) -> list[Any]:
        return [message for _, message in self.session.asked if isinstance(message, kind)]

    def _answer(self, peer: bytes, request: wire.Request) -> wire.Reply | None:
        if isinstance(request, wire.Declare):
            answer = placed(request, len(self.session.servers), self._next)
            self._next += len(answer.ids)
            return answer
        if isinstance(request, wire.InitTables):
            for number, described in zip(request.ids, request.tables, strict=True):
                self.tables[number] = (Table.of(described), request.stripe, request.stripes)
        elif isinstance(request, wire.PutRows):
            self._put(request)
        elif isinstance(request, wire.PushRows):
            return self._pushed(request)
        elif isinstance(request, wire.PullRows):
            return self._read(request, request.ids, request.wanted, request.codecs, request.buffers[0], request.wide)
        elif isinstance(request, wire.Init | wire.Push):
            assert len(request.ids) == 1
            self._arrays[request.ids[0]] = b"".join(map(bytes, request.buffers))
            if isinstance(request, wire.Push) and request.want:
                return wire.Values(request.seq, buffers=[bytearray(self._arrays[request.ids[0]])])
        elif isinstance(request, wire.Pull):
            return wire.Values(request.seq, buffers=[bytearray(self._arrays[number]) for number in request.ids])
        elif isinstance(request, wire.DescribeTable):
            return wire.TableCounts(request.seq, ["rows", "version"], [10 + request.id, 5 + request.id])
        else:
            assert not isinstance(request, wire.EvictRows) or request.id in self.tables
        return wire.Ack(request.seq)

    def _row(self, number: int, row: int) -> np.ndarray[Any, Any]:
        table, _, _ = self.tables[number]
        return self.rows.get((number, row), np.full(table.width, table.scale if table.init == "constant" else 0.0))

    def _put(self, request: wire.PutRows) -> None:
        table, stripe, stripes = self.tables[request.id]
        ids = np.frombuffer(request.buffers[0], np.int64)
        rows = np.frombuffer(request.buffers[1], table.dtype).reshape(-1, table.width)
        assert len(ids) == request.count == len(rows)
        assert set(stripes_of(table, ids, stripes).tolist()) <= {stripe}
        self.rows.update({(request.id, row): value for row, value in zip(ids.tolist(), rows, strict=True)})

    def _ids(self, request: Any, numbers: list[int], counts: list[int], buffer: Any, wide: bool) -> list[list[int]]:
        """Return the ids of each segment, which must rise and be of its stripe."""
        ids = np.frombuffer(buffer, np.int64 if wide else np.int32).astype(np.int64)
        assert len(ids) == sum(counts)
        parts = np.split(ids, np.cumsum(counts)[:-1])
        for number, part in zip(numbers, parts, strict=True):
            table, stripe, stripes = self.tables[number]
            assert bool((part[1:] > part[:-1]).all())
            assert set(stripes_of(table, part, stripes).tolist()) <= {stripe}
        return [part.tolist() for part in parts]

    def _pushed(self, request: wire.PushRows) -> wire.Reply:
        ids = self._ids(request, request.ids, request.counts, request.buffers[0], request.wide)
        view, at = memoryview(request.buffers[1]), 0
        for number, codec, pushed in zip(request.ids, request.codecs, ids, strict=True):
            table, _, _ = self.tables[number]
            length = part_bytes(len(pushed), table.width, table.dtype, codec)
            rows = read_rows(view[at : at + length], len(pushed), table.width, table.dtype, codec)
            at += length
            self.rows.update({(number, row): value.copy() for row, value in zip(pushed, rows, strict=True)})
        assert at == len(view)
        if not request.want:
            return wire.Ack(request.seq)
        if not request.union:
            return self._read(request, request.ids, request.wanted, request.codecs, request.buffers[2], request.wide)
        flat = np.array([row for of in ids for row in of], np.int64 if request.wide else np.int32)
        counts = [len(of) for of in ids]
        reply = self._read(request, request.ids, counts, request.codecs, flat.tobytes(), request.wide)
        return wire.Rows(request.seq, counts, wide=request.wide, buffers=[*reply.buffers, flat.tobytes()])

    def _read(
        self, request: Any, numbers: list[int], counts: list[int], codecs: list[str], buffer: Any, wide: bool
    ) -> wire.Rows:
        payload = bytearray()
        for number, codec, wanted in zip(
            numbers, codecs, self._ids(request, numbers, counts, buffer, wide), strict=True
        ):
            table, _, _ = self.tables[number]
            part = bytearray(part_bytes(len(wanted), table.width, table.dtype, codec))
            rows = np.array([self._row(number, row) for row in wanted], table.dtype).reshape(-1, table.width)
            write_rows(rows, codec, memoryview(part))
            payload += part
        return wire.Rows(request.seq, counts, buffers=[bytes(payload)])


def placed(request: wire.Declare, servers: int, first: int) -> wire.Placed:
    """Return where a scheduler places the keys of ``request``; their segments are numbered from ``first`` on."""
    specs: list[Spec] = [
        Spec(tuple(shape), dtype) if table is None else TableSpec.of(Table.of(table))
        for shape, dtype, table in zip(request.shapes, request.dtypes, request.tables, strict=True)
    ]
    by_key = place(
        {key: specs[kind] for key, kind in zip(request.keys, request.kinds, strict=True)},
        [0] * servers,
        request.bound,
        request.longest,
    )
    ranges = [segment for key in request.keys for segment in by_key[key]]
    return wire.Placed(
        request.seq,
        counts=[len(by_key[key]) for key in request.keys],
        ids=list(range(first, first + len(ranges))),
        servers=[each.server for each in ranges],
        starts=[each.start for each in ranges],
        stops=[each.stop for each in ranges],
    )
