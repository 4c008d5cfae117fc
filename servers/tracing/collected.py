"""What members have noted for the job's trace, as far as it has been fetched. Pure, and bounded.

Records are kept as they came, some 50 bytes each, and read when a file is made of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvstore.errors import WireError
from kvstore.wire import Node, TraceChunk, TraceFetched
from kvstore.wire.tracing import read_records

MOST_RECORDS = 200_000  # of all members; the file has some 300 bytes for each


@dataclass
class MemberNotes:
    """What one member has noted.

    Attributes:
        node: who it is.
        offsets: for each start of the scheduler, the offset that is wrong by least, and by how much; see
            ``ClockOffsets.known``.
        threads: the names of its threads, by their numbers.
        count: how many records of it are here.
        newest: the number of the latest of them.
    """

    node: Node
    offsets: dict[int, tuple[float, float]] = field(default_factory=dict)
    threads: dict[int, str] = field(default_factory=dict)
    count: int = 0
    newest: int = 0
    _chunks: list[TraceChunk] = field(default_factory=list)

    @property
    def lost(self) -> int:
        """How many records it has made that are not here."""
        return max(0, self.newest - self.count)

    def records(self) -> Iterator[list[Any]]:
        """Yield its records, in the order in which they came; see ``kvstore.wire.tracing``."""
        for chunk in self._chunks:
            yield from read_records(chunk)

    def take(self, chunk: TraceChunk, keep: int) -> int:
        """Take a chunk, and its records if there are at most ``keep``; return how many are kept.

        Raises:
            WireError: its records are not valid; nothing is taken.
        """
        records = read_records(chunk)
        for start, offset, error in chunk.offsets:
            before = self.offsets.get(start)
            if before is None or error < before[1]:
                self.offsets[start] = offset, error
        self.threads.update((ident, name) for ident, name in chunk.thread_names)
        self.newest = max([self.newest, *(record[0] for record in records)])
        if not records or len(records) > keep:
            return 0
        self._chunks.append(TraceChunk(chunk.node, [], [], chunk.over, [bytes(chunk.buffers[0])]))
        self.count += len(records)
        return len(records)


class CollectedNotes:
    """What has been fetched of one job.

    Args:
        most: how many records are kept; those that come later are counted as lost.

    Attributes:
        members: by who they are.
        after: the number of the latest chunk, for the next ``FetchTrace``.
        dropped: chunks that the scheduler had no room for.
        refused: chunks whose records were not valid.
    """

    def __init__(self, most: int = MOST_RECORDS) -> None:
        self.members: dict[Node, MemberNotes] = {}
        self.after = 0
        self.dropped = 0
        self.refused = 0
        self._left = most
        self._dropped: dict[int, int] = {}  # by the start of the scheduler

    @property
    def count(self) -> int:
        """How many records are here."""
        return sum(member.count for member in self.members.values())

    def take(self, fetched: TraceFetched) -> int:
        """Take an answer of the scheduler; return how many chunks it has brought.

        Raises:
            WireError: it has something else than chunks.
        """
        chunks = fetched.chunks
        for number, chunk in enumerate(chunks, fetched.first):
            if number <= self.after:
                continue
            self.after = number
            notes = self.members.setdefault(chunk.node, MemberNotes(chunk.node))
            try:
                self._left -= notes.take(chunk, self._left)
            except WireError:
                self.refused += 1
        self._dropped[fetched.first >> 40] = fetched.dropped
        self.dropped = sum(self._dropped.values())
        return len(chunks)
