"""The gate: what a primary says waits until its standby has stored the records before it. Pure.

So whoever has been answered has nothing to lose with the primary: neither an update that was acknowledged, nor a value
that was read.
"""

from __future__ import annotations

from collections import deque

from kvstore import wire
from servers.requests.replies import Outbox


class Gate:
    """Holds answers, in the order in which they were made.

    Attributes:
        held: how many answers have had to wait so far.
    """

    def __init__(self) -> None:
        self.held = 0
        self._waiting: deque[tuple[int, Outbox]] = deque()

    def take(self, outbox: Outbox, newest: int, stored: int) -> Outbox:
        """Return what of ``outbox`` may leave now; explanations always may.

        Args:
            outbox: made when ``newest`` was the number of the newest record.
            newest: see above.
            stored: the number up to which the standby has the records.
        """
        if not outbox or (newest <= stored and not self._waiting):
            return outbox
        leaves: Outbox = []
        waits: Outbox = []
        for entry in outbox:
            (leaves if isinstance(entry[1], wire.Explanation) else waits).append(entry)
        if waits:
            self.held += len(waits)
            self._waiting.append((newest, waits))
        return leaves

    def open(self, stored: int | None = None) -> Outbox:
        """Return what may leave now that the standby has the records up to ``stored``; None: there is no standby."""
        outbox: Outbox = []
        while self._waiting and (stored is None or self._waiting[0][0] <= stored):
            outbox += self._waiting.popleft()[1]
        return outbox

    def holds(self, peer: bytes, seq: int) -> bool:
        """Whether the answer to request ``seq`` for link ``peer`` waits here."""
        return any(
            link == peer and isinstance(message, wire.Reply) and message.seq == seq
            for _, outbox in self._waiting
            for link, message in outbox
        )
