"""The notes of members for the job's trace, as far as they have been fetched. Pure, and bounded.

Records are kept as they came, some 80 bytes each, and read when a file is made of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from kvstore import wire
from kvstore.errors import WireError
from kvstore.job.valid_values import RoundWindow
from kvstore.wire.tracing import SPAN, read_records

MOST_RECORDS = 200_000  # of all members; the file has some 300 bytes for each, and 900 for a request


@dataclass
class MemberNotes:
    """The notes of one member.

    Attributes:
        offsets: for each start of the scheduler, the offset that is wrong by least, and by how much; see
            ``ClockOffsets.known``.
        threads: the names of its threads, by their numbers.
        oldest, newest: the numbers of the first and the latest records; a process counts on from trace to trace.
        refused: chunks whose records were not valid.
    """

    node: wire.Node
    offsets: dict[int, tuple[float, float]] = field(default_factory=dict)
    threads: dict[int, str] = field(default_factory=dict)
    count: int = 0
    oldest: int = 0
    newest: int = 0
    refused: int = 0
    _chunks: list[wire.TraceChunk] = field(default_factory=list)

    @property
    def lost(self) -> int:
        return max(0, self.newest - self.oldest + 1 - self.count) if self.oldest else 0

    def records(self) -> list[list[Any]]:
        """Return its records, in the order in which they came; see ``kvstore.wire.tracing``. Invalid chunks go."""
        read: list[list[Any]] = []
        for chunk in list(self._chunks):
            try:
                read += read_records(chunk)
            except WireError:
                self._chunks.remove(chunk)
                self.count -= chunk.records
                self.refused += 1
        return read

    def take(self, chunk: wire.TraceChunk, keep: int) -> int:
        """Take a chunk, and its records if there are at most ``keep``; return how many are kept."""
        for start, offset, error in chunk.offsets:
            before = self.offsets.get(start)
            if before is None or error < before[1]:
                self.offsets[start] = offset, error
        self.threads.update((ident, name) for ident, name in chunk.thread_names)
        if not chunk.records:
            return 0
        self.newest = max(self.newest, chunk.first + chunk.records - 1)
        self.oldest = self.oldest or chunk.first
        if chunk.records > keep:
            return 0
        self._chunks.append(replace(chunk.whole, offsets=[], thread_names=[]))
        self.count += chunk.records
        return chunk.records


class CollectedNotes:
    """The notes of one job; records that come after ``most`` are counted as lost.

    Attributes:
        after: the number of the latest chunk, for the next ``FetchTrace``.
        dropped: chunks that the scheduler had no room for.
    """

    def __init__(self, most: int = MOST_RECORDS) -> None:
        self.members: dict[wire.Node, MemberNotes] = {}
        self.after = 0
        self.dropped = 0
        self._most = self._left = most
        self._dropped: dict[int, int] = {}  # by the start of the scheduler

    @property
    def count(self) -> int:
        return sum(member.count for member in self.members.values())

    @property
    def refused(self) -> int:
        """How many chunks were not valid, as far as they have been read."""
        return sum(member.refused for member in self.members.values())

    def has_round_of(self, window: RoundWindow) -> bool:
        """Return whether a worker has noted what it did in one of these rounds. It reads all records of workers."""
        return any(
            record[1] == SPAN and window.first <= record[-1] <= window.last
            for node, notes in self.members.items()
            if node.role == "worker"
            for record in notes.records()
        )

    def all_have(self, number: int) -> bool:
        """Return whether each worker has noted what it did in round ``number``. It reads all records of workers."""
        workers = [notes for node, notes in self.members.items() if node.role == "worker"]
        return bool(workers) and all(
            any(record[1] == SPAN and record[-1] == number for record in notes.records()) for notes in workers
        )

    def forget(self) -> None:
        self.members.clear()
        self._left = self._most

    def take(self, fetched: wire.TraceFetched) -> int:
        """Take an answer of the scheduler; return how many chunks it has brought."""
        chunks = fetched.chunks
        for number, chunk in enumerate(chunks, fetched.first):
            if number <= self.after:
                continue
            self.after = number
            self._left -= self.members.setdefault(chunk.node, MemberNotes(chunk.node)).take(chunk, self._left)
        self._dropped[fetched.first >> 40] = fetched.dropped
        self.dropped = sum(self._dropped.values())
        return len(chunks)
