"""The values that a reader holds, and which of their segments it asks for. Pure, but for torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from kvstore import wire
from kvstore.errors import WireError
from kvstore.lineage import NOWHERE, UNKNOWN, Version
from kvstore.rows.halves import array_dtype
from kvstore.rows.ids import Ids, stripes_of
from kvstore.rows.index import ABSENT, SlotIndex
from kvstore.rows.sums import Positions, Rows
from kvstore.spec import Key, Spec
from kvstore.table import Table
from kvstore.values import as_dtype, from_buffer
from kvstore.wire.guests import NOT_HELD, aligned

# Workers go first: a server answers readers in the time that is left, and an answer is one piece of it.
MESSAGE_BYTES = 8 << 20  # in one answer, unless a segment or a row is longer
MESSAGE_SEGMENTS = 256  # a server looks at all of them at once

MESSAGE_ROWS = 1 << 15
MOST_BYTES = 256 << 20  # of rows of one table that are held

Versions: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"  # a lineage and a number for each row: see ``Version``


class HeldRows:
    """The rows of one table."""

    def __init__(self, table: Table, most_bytes: int = MOST_BYTES) -> None:
        self._table = table
        self._most = max(1, most_bytes // table.row_bytes)
        self.forget()

    def __len__(self) -> int:
        return len(self._index)

    def forget(self) -> None:
        self._index = SlotIndex()
        self._rows: Rows = np.empty((0, self._table.width), array_dtype(self._table.dtype))
        self._versions: Versions = np.empty((0, 2), np.int64)

    def look_up(self, ids: Ids, out: Rows) -> Versions:
        """Write the rows of ``ids`` that are held to ``out``; return the version of each, or ``NOWHERE``."""
        versions: Versions = np.tile(np.array(NOWHERE, np.int64), (len(ids), 1))
        slots = self._index.find(ids)
        held = np.flatnonzero(slots != ABSENT)
        versions[held] = self._versions[slots[held]]
        out[held] = self._rows[slots[held]]
        return versions

    def note(self, ids: Ids, rows: Rows, version: Version) -> None:
        """Hold ``rows`` of ``ids``, each of which is there once, as version ``version`` of the table has them."""
        if len(ids) > self._most:
            return
        slots = self._index.find(ids)
        new = np.flatnonzero(slots == ABSENT)
        # All are forgotten, not those that were read longest ago: to know these, each look-up would have to write. A
        # reader whose rows do not fit would lose them to either.
        if len(self) + len(new) > self._most:
            self.forget()
            slots, new = np.full(len(ids), ABSENT, np.int32), np.arange(len(ids))
        slots[new] = self._index.insert(ids[new])
        if self._index.top > len(self._versions):
            room = min(max(2 * len(self._versions), self._index.top), max(self._most, self._index.top))
            self._rows = _longer(self._rows, room)
            self._versions = _longer(self._versions, room)
        self._rows[slots] = rows
        self._versions[slots] = version


class RowsOfServer(NamedTuple):
    """What one message asks for: rows of a table on one server."""

    server: int
    positions: Positions
    ids: Ids
    versions: Versions | None

    def fields(self, wide: bool) -> dict[str, Any]:
        """Return the fields of the request, but its store, segment and slack."""
        buffers: list[wire.Buffer] = [self.ids.astype(np.int64 if wide else np.int32).data.cast("B")]
        lineage = None
        if self.versions is not None and self.versions[:, 0].any():
            lineages, numbers = self.versions.T
            lineage = int(lineages.max())  # the server's last, or one that it does not know, either
            buffers.append(np.where(lineages == lineage, numbers, NOT_HELD).data.cast("B"))
        return {"count": len(self.ids), "wide": wide, "lineage": lineage, "buffers": buffers}

    def take(self, reply: wire.RowsRead, out: Rows, held: HeldRows | None) -> list[int]:
        """Take the answer: write its rows to ``out``, and hold them; return the numbers of the rows' versions now.

        Raises:
            WireError: it is not one to this request.
        """
        buffers = [memoryview(buffer).cast("B") for buffer in reply.buffers]
        nbytes = reply.count * out.itemsize * out.shape[1]
        positions = np.arange(len(self.ids))
        if len(buffers) == 2 and buffers[1].nbytes == 8 * reply.count:
            positions = np.frombuffer(buffers[1], np.int64) if reply.count else np.empty(0, np.int64)
        wrong = len(buffers) not in (1, 2) or buffers[0].nbytes != nbytes or len(positions) != reply.count
        if wrong or bool(((positions < 0) | (positions >= len(self.ids))).any()):
            raise WireError(f"an answer of {reply.count} rows where {len(self.ids)} were asked for")
        kept = np.ones(len(self.ids), bool)
        kept[positions] = False
        numbers = [] if self.versions is None else np.unique(self.versions[kept, 1]).tolist()
        if not reply.count:
            return numbers
        at = Version(*reply.at)
        rows = np.frombuffer(buffers[0], out.dtype).reshape(reply.count, out.shape[1])
        out[self.positions[positions]] = rows
        if held is not None:
            held.note(self.ids[positions], rows, at)
        return [*numbers, at.number]


def reads_of_rows(table: Table, ids: Ids, versions: Versions | None, servers: int) -> Iterator[RowsOfServer]:
    """Yield the messages that ask for the rows of ``ids``: by server, up to a length."""
    at_once = max(1, min(MESSAGE_ROWS, MESSAGE_BYTES // table.row_bytes))
    stripes = stripes_of(table, ids, servers) if servers > 1 else np.zeros(len(ids), np.int64)
    for server in range(servers):
        positions = np.flatnonzero(stripes == server)
        for start in range(0, len(positions), at_once):
            chosen = positions[start : start + at_once]
            yield RowsOfServer(server, chosen, ids[chosen], None if versions is None else versions[chosen])


def _longer(array: Any, length: int) -> Any:
    longer = np.empty((length, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer


class ReadSegment(NamedTuple):
    """A segment of a value: elements ``start`` to ``stop``, on ``server``."""

    id: int
    server: int
    start: int
    stop: int


class HeldValue:
    """A value as far as this reader has read it.

    Attributes:
        versions: of each segment, which one is held here; ``NOWHERE`` for none.
        rows: of a table, the rows that are held; None if none are to be.
        pulled: the rounds of the oldest and the newest segment of the last pull; for a table, of its rows. None before.
    """

    def __init__(self, key: Key, spec: Spec, store: int, segments: Sequence[ReadSegment]) -> None:
        self.key = key
        self.spec = spec
        self.store = store
        self.segments = list(segments)
        self.versions = [NOWHERE] * len(self.segments)
        self.rows: HeldRows | None = None
        self.pulled: tuple[int, int] | None = None
        self._flat: torch.Tensor | None = None

    @property
    def flat(self) -> torch.Tensor:
        if self._flat is None:
            self._flat = torch.empty(self.spec.size, dtype=as_dtype(self.spec.dtype), device="cpu")
        return self._flat

    def take(self, place: int, version: Version, buffer: memoryview) -> None:
        segment = self.segments[place]
        self.versions[place] = NOWHERE  # while it is written
        self.flat[segment.start : segment.stop] = from_buffer(buffer, self.spec.dtype)
        self.versions[place] = version


class SegmentRead(NamedTuple):
    """What one message asks for: segments of values on one server."""

    store: int
    server: int
    parts: list[tuple[HeldValue, int]]  # values, and the place of one of their segments

    @property
    def fields(self) -> dict[str, object]:
        held = [value.versions[place] for value, place in self.parts]
        lineage = max(version.lineage for version in held)  # the server's, or one that it does not know, either
        return {
            "store": self.store,
            "ids": [value.segments[place].id for value, place in self.parts],
            "lineage": lineage,
            "versions": [version.number if lineage == version.lineage != UNKNOWN else NOT_HELD for version in held],
        }

    def take(self, reply: wire.ValuesRead) -> None:
        """Take the answer. Raises ``WireError`` if it is not one to this request."""
        sizes = [self._nbytes(position) for position in reply.positions if position < len(self.parts)]
        buffers = [memoryview(buffer) for buffer in reply.buffers]
        total = sum(buffer.nbytes for buffer in buffers)
        if (
            len(reply.versions) != len(self.parts)
            or len(sizes) != len(reply.positions)
            or len(buffers) > 1
            or total != sum(map(aligned, sizes))
        ):
            raise WireError(f"an answer of {total} bytes and {len(reply.positions)} of {len(self.parts)} segments")
        start = 0
        for position, nbytes in zip(reply.positions, sizes, strict=True):
            value, place = self.parts[position]
            part = buffers[0][start : start + nbytes] if nbytes else memoryview(b"")
            value.take(place, Version(reply.lineage, reply.versions[position]), part)
            start += aligned(nbytes)

    def _nbytes(self, position: int) -> int:
        value, place = self.parts[position]
        segment = value.segments[place]
        return (segment.stop - segment.start) * value.spec.itemsize


def reads_of(values: Iterable[HeldValue]) -> Iterator[SegmentRead]:
    """Yield the messages that ask for all segments of ``values``: one server's together, up to a length."""
    open_reads: dict[tuple[int, int], tuple[SegmentRead, int]] = {}
    for value in values:
        for place, (_, server, start, stop) in enumerate(value.segments):
            where = value.store, server
            nbytes = aligned((stop - start) * value.spec.itemsize)
            read, before = open_reads.get(where, (SegmentRead(value.store, server, []), 0))
            if read.parts and (before + nbytes > MESSAGE_BYTES or len(read.parts) >= MESSAGE_SEGMENTS):
                yield read
                read, before = SegmentRead(value.store, server, []), 0
            read.parts.append((value, place))
            open_reads[where] = read, before + nbytes
    for read, _ in open_reads.values():
        yield read
