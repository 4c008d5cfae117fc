"""A reader's request for values: they are copied a piece at a time, each segment as one round has left it. Pure.

A message that referred to the values themselves would make the next round move them to other memory, so that workers
would wait for readers. So readers get a copy, which is made when no worker's message waits. If a round changes a
segment of which only a part is copied, its copy begins anew.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Protocol

from kvstore import wire
from kvstore.errors import UsageError
from kvstore.lineage import UNKNOWN
from kvstore.transport.memory import Memory
from kvstore.values import to_buffer
from kvstore.wire.guests import NOT_HELD, aligned
from servers.store.bucket import Bucket
from servers.store.served_store import ServedStore

MOST_BYTES = 64 << 20  # in one answer, unless it is one segment
MOST_SEGMENTS = 1024  # in one answer: looking at them is not done in pieces
LEAST_BYTES = 4 << 10  # what a segment costs at least, as if it had so many
TRIES = 3  # so often a segment's copy may be overtaken by a round; then it is made at once


class PiecewiseRead(Protocol):
    """A reader's request, which is answered a piece at a time."""

    def step(self, nbytes: int) -> wire.Reply | None:
        """Copy about so many bytes; return the answer if that was the last piece.

        Raises:
            UsageError, WeightsInDoubt: it cannot be answered.
        """
        ...


class ValueRead:
    """See the module and ``PiecewiseRead``.

    Args:
        store: of the segments.
        message: the request.
        memory: for the copies.

    Raises:
        KeyNotInitialized: a segment is not here.
        UsageError: it asks for more than fits into one answer.
    """

    def __init__(self, store: ServedStore, message: wire.ReadValues, memory: Memory) -> None:
        if len(message.ids) > MOST_SEGMENTS:
            raise UsageError(f"{len(message.ids)} segments are too many; ask for at most {MOST_SEGMENTS} at once")
        if moved := store.buckets.moved:
            for number in message.ids:
                if (key := store.buckets.segment(number).key) in moved:
                    raise UsageError(f"key {key!r} is a table by now, and its array is not updated any more: ask again")
        self._store = store
        self._message = message
        self._numbers = [store.buckets.holding(number).version for number in message.ids]
        comparable = message.lineage == store.lineage != UNKNOWN
        self._positions = [
            position
            for position, (held, now) in enumerate(zip(message.versions, self._numbers, strict=True))
            if not comparable or held == NOT_HELD or not 0 <= now - held <= message.slack
        ]
        sizes = [store.buckets.segment(message.ids[position]).spec.nbytes for position in self._positions]
        self._starts = list(accumulate(map(aligned, sizes), initial=0))
        total = self._starts.pop()
        if total > MOST_BYTES and len(sizes) > 1:
            raise UsageError(f"{total} bytes in one answer are too many; ask for at most {MOST_BYTES} at once")
        self._buffer = memory.allocate(total) if total else None
        self._at = 0  # which of the positions is being copied
        self._source: tuple[Bucket, object] | None = None  # its bucket, and the state of that when its copy began
        self._done = 0  # bytes of it
        self._tries = 0

    def step(self, nbytes: int) -> wire.ValuesRead | None:
        """See ``PiecewiseRead``."""
        self._store.buckets.require_sound(self._message.ids)
        while self._at < len(self._positions) and nbytes > 0:
            nbytes -= max(LEAST_BYTES, self._copy(nbytes))
        if self._at < len(self._positions):
            return None
        buffers = [] if self._buffer is None else [self._buffer]
        return wire.ValuesRead(self._message.seq, self._store.lineage, self._numbers, self._positions, buffers)

    def _copy(self, nbytes: int) -> int:
        """Copy at most so many bytes of a segment, or all of one that was overtaken too often; return how many."""
        number = self._message.ids[self._positions[self._at]]
        bucket, place = self._store.buckets.find(number)
        if self._source is None or self._source[0] is not bucket or self._source[1] is not bucket.state:
            self._tries += 1
            self._source, self._done = (bucket, bucket.state), 0
        start = bucket.starts[place]
        values = to_buffer(bucket.value[start : start + bucket.sizes[place]])
        whole = len(values)
        stop = whole if self._tries > TRIES else min(whole, self._done + nbytes)
        if self._buffer is not None:
            first = self._starts[self._at]
            self._buffer[first + self._done : first + stop] = values[self._done : stop]
        copied, self._done = stop - self._done, stop
        if stop == whole:
            self._numbers[self._positions[self._at]] = bucket.version
            self._at, self._source, self._tries = self._at + 1, None, 0
        return copied
