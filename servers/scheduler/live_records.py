"""Which records of the scheduler's log a successor still needs, so that the log of a long job stays short. Pure.

All are needed but those of barriers that are over: all workers have come to such a barrier, and each has said since
that it has its answer. A job may have a barrier in every step. What else is logged grows with what the job declares.
"""

from __future__ import annotations

import itertools

from kvstore import wire
from servers.scheduler.records import Came, Record, sender_of


class LiveRecords:
    """The records of one log, as bytes.

    Args:
        num_workers: of the job.

    Attributes:
        nbytes: of all of them together.
    """

    def __init__(self, num_workers: int) -> None:
        self.nbytes = 0
        self._num_workers = num_workers
        self._numbers = itertools.count()
        self._records: dict[int, bytes] = {}
        self._done: dict[wire.Node, int] = {}  # each sender has its answers to all requests below this number
        self._barriers: dict[
            tuple[int, int], dict[int, tuple[wire.Node, int]]
        ] = {}  # by store and number, then by record

    def add(self, data: bytes, record: Record | None) -> None:
        """Add a record to the end of the log."""
        number = next(self._numbers)
        self._records[number] = data
        self.nbytes += len(data)
        sender = sender_of(record)
        if sender is None:
            return
        self._done[sender.node] = max(sender.done, self._done.get(sender.node, 0))
        if isinstance(record, Came) and isinstance(record.message, wire.Barrier):
            barrier = (record.message.store, record.message.number)
            self._barriers.setdefault(barrier, {})[number] = sender.node, sender.seq

    def trim(self) -> bytes:
        """Drop what is not needed; return the rest, in order."""
        for barrier, arrivals in list(self._barriers.items()):
            if self._over(arrivals):
                del self._barriers[barrier]
                for number in arrivals:
                    self.nbytes -= len(self._records.pop(number))
        return b"".join(self._records.values())

    def _over(self, arrivals: dict[int, tuple[wire.Node, int]]) -> bool:
        if len({node.rank for node, _ in arrivals.values()}) < self._num_workers:
            return False
        return all(seq < self._done[node] for node, seq in arrivals.values())
