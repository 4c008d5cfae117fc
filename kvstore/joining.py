"""A worker's pause, from its call of ``join`` until all servers have let it go on. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstore.shares import Entry
from kvstore.tickets import Ticket
from kvstore.wire import Resume


class Joining:
    """What servers have answered so far; ``ticket`` is done when all have."""

    def __init__(self) -> None:
        self.ticket = Ticket("join")
        self.last = 0
        self._clocks: dict[int, int] = {}

    def take(self, ids: Sequence[int], reply: Resume) -> None:
        """Take one server's answer for its pieces ``ids``."""
        self.last = reply.last
        self._clocks.update(zip(ids, reply.clocks, strict=True))

    def advance(self, entries: Iterable[Entry]) -> None:
        """Let the next push of each key follow the rounds that others have made meanwhile."""
        for entry in entries:
            known = [self._clocks[piece.id] for piece in entry.pieces if piece.id in self._clocks]
            entry.clock = max(entry.clock, min(known, default=0))
