"""A reader's request for rows of a table: they are gathered a piece at a time, all as one update has left them. Pure.

See ``value_read``, whose reasons hold here, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore import wire
from kvstore.errors import UsageError, WireError
from kvstore.lineage import UNKNOWN
from kvstore.rows.ids import Ids
from kvstore.transport.memory import Memory
from servers.reading.value_read import MOST_BYTES, TRIES
from servers.store.served_store import ServedStore

MOST_ROWS = 1 << 16  # in one answer: looking at their ids is not done in pieces
PIECE_ROWS = 1024  # narrow rows cost more than their bytes


class RowRead:
    """See the module and ``PiecewiseRead``.

    Args:
        store: of the table.
        message: the request.
        memory: for the rows.

    Raises:
        UsageError: there is no such table here, an id cannot be in it, or it asks for too many rows at once.
        WireError: its buffers have not the lengths that it says.
    """

    def __init__(self, store: ServedStore, message: wire.ReadRows, memory: Memory) -> None:
        self._store = store
        self._message = message
        self._memory = memory
        (target,) = store.buckets.read_tables([message.id])
        self._table = target.table
        description = self._table.table
        nbytes = message.count * description.row_bytes
        if (nbytes > MOST_BYTES and message.count > 1) or message.count > MOST_ROWS:
            raise UsageError(
                f"{message.count} rows of {nbytes} bytes in one answer are too many; ask for at most {MOST_ROWS} rows, "
                f"and {MOST_BYTES} bytes, at once"
            )
        holds = message.lineage is not None
        expected = [message.count * (8 if message.wide else 4), *([message.count * 8] if holds else [])]
        lengths = [memoryview(buffer).nbytes for buffer in message.buffers]
        if lengths != expected:
            raise WireError(f"{message.node} sent {lengths} bytes of ids and versions, not {expected}")
        self._ids: Ids = _integers(message.buffers[0], "i8" if message.wide else "i4").astype(np.int64, copy=False)
        self._table.require(self._ids)
        self._held = _integers(message.buffers[1], "i8") if holds else None
        self._tries = 0
        self._begin()

    def _begin(self) -> None:
        """Begin with the rows as they are now."""
        at = self._at = self._table.at
        self._tries += 1
        self._positions: Any = None  # of the rows that are to come; None: of all
        if self._held is not None and self._message.lineage == at.lineage != UNKNOWN:
            gone = at.number - self._held
            fresh = (self._held >= 0) & (gone >= 0) & (gone <= self._message.slack)
            if fresh.any():
                self._positions = np.flatnonzero(~fresh)
        self._chosen = self._ids if self._positions is None else self._ids[self._positions]
        description = self._table.table
        self._buffer = self._memory.allocate(max(1, len(self._chosen) * description.row_bytes))
        shape = len(self._chosen), description.width
        self._rows = np.frombuffer(self._buffer, description.dtype, shape[0] * shape[1]).reshape(shape)
        self._done = 0

    def step(self, nbytes: int) -> wire.RowsRead | None:
        """See ``PiecewiseRead``."""
        self._store.buckets.require_sound([self._message.id])
        if self._table.at != self._at:  # rows that are put do not move the number
            self._begin()
        count = len(self._chosen)
        stop = min(count, self._done + max(1, min(PIECE_ROWS, nbytes // self._table.table.row_bytes)))
        if self._tries > TRIES:
            stop = count
        self._table.pull(self._chosen[self._done : stop], self._rows[self._done : stop])
        self._done = stop
        if stop < count:
            return None
        buffers: list[wire.Buffer] = [self._buffer[: self._rows.nbytes]]
        if self._positions is not None:
            buffers.append(self._positions.astype(np.int64).tobytes())
        return wire.RowsRead(self._message.seq, self._at, count, buffers)


def _integers(buffer: wire.Buffer, dtype: str) -> Any:
    view = memoryview(buffer)
    return np.frombuffer(view, dtype) if view.nbytes else np.empty(0, dtype)
