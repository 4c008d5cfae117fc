"""A worker's pauses, each from its call of ``join`` until all servers have let it go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstore.errors import DeadlineExceeded, KVStoreError
from kvstore.dist.requests import Remote
from kvstore.dist.parcels import Entry
from kvstore.spec import Key
from kvstore.ticket import Ticket
from kvstore.wire import Resume


class Joining:
    """The pauses of one worker in one store, one after the other.

    Args:
        remote: the scheduler and the servers.
    """

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._number = 0
        self._ticket: Ticket | None = None
        self._last = 0
        self._clocks: dict[int, int] = {}  # by segment: where its rounds are when the worker goes on

    @property
    def under_way(self) -> bool:
        """Whether this worker pauses."""
        return self._ticket is not None

    def announce(self) -> None:
        """Tell the scheduler that this worker is about to pause, before any server lets others go on because of it."""
        self._remote.announce_pause(self._number + 1)

    def begin(self, entries: Mapping[Key, Entry]) -> None:
        """Tell the servers; nothing may be pushed from here to ``end``."""
        self._number += 1
        self._clocks.clear()
        self._ticket = self._remote.pause(self._number, entries, self._take)

    def wait(self, timeout: float | None) -> None:
        """Return when all servers let this worker go on; after ``DeadlineExceeded`` it pauses all the same."""
        if self._ticket is None:
            return
        try:
            self._ticket.wait(timeout)
        except DeadlineExceeded:
            raise
        except KVStoreError:
            self._ticket = None
            raise

    def end(self, entries: Mapping[Key, Entry]) -> int:
        """Let the next push of each key follow the rounds of others meanwhile; return the rank that joined last."""
        for entry in entries.values():
            known = [self._clocks[piece.id] for piece in entry.pieces if piece.id in self._clocks]
            entry.clock = max(entry.clock, min(known, default=0))
        self._ticket = None
        return self._last

    def _take(self, ids: Sequence[int], reply: Resume) -> None:
        self._last = reply.last
        self._clocks.update(zip(ids, reply.clocks, strict=True))
