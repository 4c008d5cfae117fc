from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from asking import sender

from kvstore import wire
from kvstore.errors import KVStoreError, UsageError, WireError
from kvstore.rule import Rule
from kvstore.table import Table
from kvstore.transport.memory import Heap
from servers.reading import desk
from servers.reading.desk import TRIES, RowRead
from servers.store.served_store import ServedStore


def store() -> ServedStore:
    """A table of 10 rows of two numbers, of which this server has the even ones."""
    served = ServedStore(Rule("sync"), range(1), lineage=7)
    table = Table(shape=(10, 2), init="constant", scale=1.0)
    served.tables.init(wire.InitTables(sender(), 0, [4], ["t"], [table.described], 0, 2))
    return served


def push(served: ServedStore, clock: int, row: int, value: float) -> None:
    ids, rows = np.array([row], np.int32), np.full((1, 2), value, np.float32)
    padded = rows.tobytes().ljust(16, b"\0")
    fields: dict[str, Any] = {"lr": None, "rescale": None, "changes": [], "codecs": ["none"]}
    buffers = [bytearray(ids.tobytes()), bytearray(padded), bytearray()]
    served.push_rows(
        b"", wire.PushRows(sender(seq=clock), 0, [4], [clock], [1], [0], False, False, False, **fields, buffers=buffers)
    )


def begin(
    served: ServedStore, ids: list[int], versions: list[int] | None = None, slack: int = 0, **more: Any
) -> RowRead:
    buffers = [bytearray(np.array(ids, np.int32).tobytes())]
    if versions is not None:
        buffers.append(bytearray(np.array(versions, np.int64).tobytes()))
    fields = {
        "count": len(ids),
        "wide": False,
        "lineage": None if versions is None else served.buckets.table(4).table.lineage,
        "buffers": buffers,
        **more,
    }
    return RowRead(served, wire.ReadRows(sender(role="reader"), 0, 4, slack=slack, **fields), Heap())


def finish(read: RowRead, nbytes: int = 1 << 20) -> wire.RowsRead:
    while (reply := read.step(nbytes)) is None:
        pass
    return reply


def rows_of(reply: wire.RowsRead) -> list[list[float]]:
    return np.frombuffer(reply.buffers[0], np.float32).reshape(reply.count, 2).tolist()


def test_rows_come_in_the_order_of_their_ids_with_the_tables_version() -> None:
    served = store()
    push(served, 1, 4, 7.0)
    reply = finish(begin(served, [8, 4, 8]))
    assert (reply.at.number, reply.count, rows_of(reply)) == (1, 3, [[1, 1], [7, 7], [1, 1]])
    assert len(reply.buffers) == 1


def test_rows_that_are_fresh_enough_do_not_come() -> None:
    served = store()
    for clock in (1, 2, 3):
        push(served, clock, 4, float(clock))
    reply = finish(begin(served, [2, 4, 6], [2, -1, 1], slack=1))
    assert (reply.at.number, rows_of(reply)) == (3, [[3, 3], [1, 1]])
    assert np.frombuffer(reply.buffers[1], np.int64).tolist() == [1, 2]
    nothing = finish(begin(served, [2], [3]))
    assert (nothing.count, nothing.at.number) == (0, 3)


def test_rows_that_an_update_overtakes_are_gathered_anew() -> None:
    served = store()
    read = begin(served, [2, 4, 6])
    assert read.step(8) is None
    push(served, 1, 2, 5.0)
    reply = finish(read, 8)
    assert (reply.at.number, rows_of(reply)[0]) == (1, [5, 5])


def test_rows_that_are_put_meanwhile_are_gathered_anew_though_the_version_is_the_same() -> None:
    served = store()
    table = served.buckets.table(4).table
    held = table.lineage
    read = begin(served, [2, 4, 6], [0, 0, 0], slack=9, lineage=held)
    table.put(np.array([2, 4, 6]), np.full((3, 2), 5, np.float32), {}, None)
    reply = finish(read, 8)
    assert rows_of(reply) == [[5, 5]] * 3
    assert reply.at != (held, 0)
    assert reply.at.number == 0


def test_rows_that_updates_always_overtake_are_gathered_at_once() -> None:
    served = store()
    read = begin(served, [2, 4, 6])
    steps, reply = 0, None
    while reply is None:
        reply = read.step(8)
        steps += 1
        push(served, steps, 2, float(steps))
    assert steps == TRIES + 1
    assert (reply.at.number, rows_of(reply)[0]) == (TRIES, [TRIES, TRIES])


@pytest.mark.parametrize(
    ("ids", "more", "error"),
    [
        ([10], {}, UsageError),
        ([-2], {}, UsageError),
        ([3], {}, UsageError),  # of the other server
        ([2], {"count": 2}, WireError),
        ([2], {"wide": True}, WireError),
        ([2], {"lineage": 7}, WireError),
        ([2], {"buffers": []}, WireError),
    ],
)
def test_bad_requests_are_refused(ids: list[int], more: dict[str, Any], error: type[KVStoreError]) -> None:
    with pytest.raises(error):
        begin(store(), ids, **more)


def test_too_many_rows_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "MOST_BYTES", 8)
    with pytest.raises(UsageError, match="2 rows of 16 bytes"):
        begin(store(), [2, 4])


def test_no_rows_are_an_answer() -> None:
    assert finish(begin(store(), [])).count == 0
