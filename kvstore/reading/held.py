"""The values that a reader holds, and which of their segments it asks for. Pure, but for torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from kvstore import wire
from kvstore.errors import WireError
from kvstore.lineage import NOWHERE, UNKNOWN, Version
from kvstore.reading.held_rows import HeldRows
from kvstore.spec import Key, Spec
from kvstore.values import as_dtype, from_buffer
from kvstore.wire.guests import NOT_HELD, aligned

MESSAGE_BYTES = 8 << 20  # in one answer, unless a segment is longer
MESSAGE_SEGMENTS = 256  # a server looks at all of them at once


class ReadSegment(NamedTuple):
    """A segment of a value; see ``kvstore.client.entries.Segment``."""

    id: int
    server: int
    start: int
    stop: int


class HeldValue:
    """A value as far as this reader has read it.

    Attributes:
        key, spec: what it is.
        store: the number of its store.
        segments: where it is.
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
        """All its elements."""
        if self._flat is None:
            self._flat = torch.empty(self.spec.size, dtype=as_dtype(self.spec.dtype), device="cpu")
        return self._flat

    def take(self, place: int, version: Version, buffer: memoryview) -> None:
        """Take the value of a segment."""
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
        """Of the request, but its slack."""
        held = [value.versions[place] for value, place in self.parts]
        lineage = max(version.lineage for version in held)  # the server's, or one that it does not know, either
        return {
            "store": self.store,
            "ids": [value.segments[place].id for value, place in self.parts],
            "lineage": lineage,
            "versions": [version.number if lineage == version.lineage != UNKNOWN else NOT_HELD for version in held],
        }

    def take(self, reply: wire.ValuesRead) -> None:
        """Take the answer.

        Raises:
            WireError: it is not one to this request.
        """
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
    """Yield the messages that ask for all segments of ``values``: those of one server together, up to a length."""
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
