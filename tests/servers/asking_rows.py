"""What tests say to a shard about tables, and the rows that they hear; see ``asking``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from asking import Desk, Worker

from kvstore import wire
from kvstore.lineage import Version
from kvstore.rows.halves import narrowed, widened
from kvstore.rows.layout import part_bytes, read_rows, write_rows
from kvstore.table import Table

Gradients = Mapping[int, Mapping[int, Sequence[float]]]  # by segment and id


def init_tables(worker: Worker, tables: dict[int, Table], stripe: int = 0, stripes: int = 1) -> wire.InitTables:
    keys = [f"t{number}" for number in tables]
    return wire.InitTables(
        worker.me(), 0, list(tables), keys, [table.described for table in tables.values()], stripe, stripes
    )


def push_rows(
    worker: Worker,
    gradients: Gradients,
    clock: int | list[int] = 1,
    wanted: Mapping[int, Sequence[int]] | None = None,
    *,
    want: bool | None = None,
    wide: bool = False,
    union: bool = False,
    dtype: str = "float32",
    codec: str = "none",
    **others: Any,
) -> wire.PushRows:
    """Rows of each segment by id, in this order; ``wanted`` by segment."""
    wanted = wanted or {}
    number = np.dtype(np.int64 if wide else np.int32)
    ids = np.array([each for rows in gradients.values() for each in rows], number)
    return wire.PushRows(
        worker.me(),
        0,
        list(gradients),
        [clock] * len(gradients) if isinstance(clock, int) else clock,
        [len(rows) for rows in gradients.values()],
        [len(wanted.get(segment, ())) for segment in gradients],
        wide,
        bool(wanted) or union if want is None else want,
        union,
        others.pop("lr", None),
        others.pop("rescale", None),
        others.pop("changes", []),
        [codec] * len(gradients),
        buffers=[
            ids.tobytes(),
            b"".join(_encoded(_array(rows.values(), dtype), codec) for rows in gradients.values()),
            np.array([each for segment in gradients for each in wanted.get(segment, ())], number).tobytes(),
        ],
        **others,
    )


def _array(rows: Iterable[Sequence[float]], dtype: str) -> Any:
    return narrowed(np.array(list(rows), np.float64), dtype)


def pull_rows(
    worker: Worker, wanted: Mapping[int, Sequence[int]], clock: int = 0, *, wide: bool = False, codec: str = "none"
) -> wire.PullRows:
    ids = np.array([each for ids in wanted.values() for each in ids], np.int64 if wide else np.int32)
    return wire.PullRows(
        worker.me(),
        0,
        list(wanted),
        [clock] * len(wanted),
        [len(ids) for ids in wanted.values()],
        wide,
        [codec] * len(wanted),
        buffers=[ids.tobytes()],
    )


def put_rows(
    worker: Worker, segment: int, rows: Mapping[int, Sequence[float]], dtype: str = "float32", **others: Any
) -> wire.PutRows:
    buffers = [np.array(list(rows), np.int64).tobytes(), _array(rows.values(), dtype).tobytes()]
    fields = {"version": None, "steps": None, "names": [], "dtypes": [], "columns": []} | others
    return wire.PutRows(worker.me(), 0, segment, len(rows), buffers=[*buffers, *fields.pop("parts", [])], **fields)


def freeze(worker: Worker, segment: int, clock: int = 0, since: Version | None = None) -> wire.FreezeTable:
    return wire.FreezeTable(worker.me(), 0, segment, clock, since)


def read_frozen(
    worker: Worker, number: int, start: int = 0, count: int = 100, *, gone: bool = False, state: bool = False
) -> wire.ReadFrozen:
    return wire.ReadFrozen(worker.me(), 0, number, start, count, gone, state)


def thaw(worker: Worker, number: int) -> wire.Thaw:
    return wire.Thaw(worker.me(), 0, number)


def evict(worker: Worker, segment: int, clock: int = 0) -> wire.EvictRows:
    return wire.EvictRows(worker.me(), 0, segment, clock)


def describe(worker: Worker, segment: int) -> wire.DescribeTable:
    return wire.DescribeTable(worker.me(), 0, segment)


def with_tables(
    workers: int = 2, mode: str = "sync", tables: dict[int, Table] | None = None, stripes: int = 1, **rule: Any
) -> Desk:
    """A shard with tables: that of segment 7 has ten rows of two zeros, unless others are given."""
    desk = Desk(workers, mode, **rule)
    tables = {7: Table(shape=(10, 2))} if tables is None else tables
    ask(desk, init_tables(desk.workers[0], tables, 0, stripes))
    return desk


def ask(desk: Desk, message: Any) -> None:
    """Let worker 0 ask what is done at once."""
    assert desk.reply(desk.workers[0], message) == wire.Ack(message.seq)


def rows_in(reply: Any, width: int = 2, dtype: str = "float32", codec: str = "none") -> list[Any]:
    assert isinstance(reply, wire.Rows), reply
    payload, found, start = bytes(reply.buffers[0]), [], 0
    for count in reply.counts:
        stop = start + part_bytes(count, width, dtype, codec)
        found.append(widened(read_rows(payload[start:stop], count, width, dtype, codec)).tolist())
        start = stop
    assert start == len(payload)
    return found


def table_rows(desk: Desk, ids: Sequence[int], segment: int = 7, clock: int = 0) -> Any:
    reply = desk.reply(desk.workers[0], pull_rows(desk.workers[0], {segment: ids}, clock))
    return rows_in(reply)[0]


def _encoded(rows: Any, codec: str) -> bytes:
    if not rows.size:
        return b""
    part = bytearray(part_bytes(*rows.shape, str(rows.dtype), codec))
    write_rows(rows, codec, memoryview(part))
    return bytes(part)
