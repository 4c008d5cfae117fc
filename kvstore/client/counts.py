"""The counters of one worker in one store; see ``Statistics``. Pure."""

from __future__ import annotations

from typing import NamedTuple

from kvstore import wire


class Counts(NamedTuple):
    """How much has been pushed and pulled so far.

    A change makes new counts, which replace the old ones in one step. An exception cannot leave a mixture of both.

    Attributes:
        pushes, pulls: keys, counted once for each call that had them.
        bytes_pushed, bytes_pulled: bytes of values that answered messages have carried.
        late: segments of pushes that came after their rounds were over.
        staleness: how often a read was so many pushes ahead of the slowest worker.
        ahead: how many the last read was.
    """

    pushes: int = 0
    pulls: int = 0
    bytes_pushed: int = 0
    bytes_pulled: int = 0
    late: int = 0
    staleness: tuple[tuple[int, int], ...] = ()
    ahead: int = 0

    def called(self, pushes: int, pulls: int) -> Counts:
        """Return the counts after a call that pushes and pulls so many keys."""
        return Counts(self.pushes + pushes, self.pulls + pulls, *self[2:])

    def sent(self, nbytes: int, reply: wire.Ack | wire.Rows | wire.Values, quorum: bool) -> Counts:
        """Return the counts after the answer to a message that carried ``nbytes`` of gradients.

        Args:
            quorum: whether rounds may be over before this worker's push is there.
        """
        pushes, pulls, bytes_pushed, bytes_pulled, late, staleness, ahead = self
        late += reply.missed if quorum else 0
        return Counts(pushes, pulls, bytes_pushed + nbytes, bytes_pulled, late, staleness, ahead)

    def received(self, nbytes: int, ahead: int | None) -> Counts:
        """Return the counts after values of ``nbytes`` came, read ``ahead`` of the slowest; None without a bound."""
        pushes, pulls, bytes_pushed, bytes_pulled, late, staleness, before = self
        if ahead is not None:
            times = dict(staleness)
            times[ahead] = times.get(ahead, 0) + 1
            staleness = tuple(times.items())
        now = before if ahead is None else ahead
        return Counts(pushes, pulls, bytes_pushed, bytes_pulled + nbytes, late, staleness, now)
