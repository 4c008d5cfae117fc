"""The primary of a server's rank: its shard serves, each change is recorded, and answers wait at the gate. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Protocol

from kvstore import wire
from servers.replication.gate import Gate
from servers.replication.journal import Journal
from servers.requests.replies import Outbox


class Replicated(Protocol):
    """What a replica needs of its shard; see ``Shard``."""

    @property
    def rank(self) -> int:
        """Of the server."""
        ...

    @property
    def rounds(self) -> int:
        """The highest number of rounds that are over."""
        ...

    def refusal(self, peer: bytes, message: wire.Message) -> Outbox | None:
        """Return what to send instead of handling ``message``; None if its sender may speak."""
        ...

    def handle(self, peer: bytes, message: wire.Message) -> Outbox:
        """Serve; its recorder is told of each change."""
        ...

    def depart(self, workers: Collection[int]) -> Outbox:
        """Note which workers have left in order."""
        ...

    def apply(self, message: wire.Message) -> None:
        """Make a change that a primary has recorded."""
        ...

    def capture(self) -> Iterator[wire.Message]:
        """Return the records that make this state of a new shard. The state is that of the call."""
        ...


class Primary:
    """See the module.

    Args:
        shard: serves. Its recorder is to be ``record``.

    Attributes:
        gate: where answers wait.
        journal: the records for the standby; None while there is none.
    """

    def __init__(self, shard: Replicated) -> None:
        self.gate = Gate()
        self.journal: Journal | None = None
        self._shard = shard
        self._gates = False  # whether answers wait for the standby
        self._synced_at: int | None = None  # from this record on, the standby has all; None until that is known

    @property
    def synced(self) -> bool:
        """Whether the standby has all that anybody has been answered for."""
        return self.journal is not None and self._synced_at is not None and self.journal.stored >= self._synced_at

    @property
    def nbytes(self) -> int:
        """How many bytes of state the standby has been sent."""
        return 0 if self.journal is None else self.journal.nbytes

    @property
    def capturing(self) -> bool:
        """Whether ``go_on`` has something to send."""
        return self.journal is not None and self.journal.capturing

    def record(self, message: wire.Message) -> None:
        """Send a change of the shard to the standby, if there is one."""
        if self.journal is not None:
            self.journal.add(message)

    def handle(self, peer: bytes, message: wire.Message) -> Outbox:
        """Return what to send, and to whom, because ``message`` came from ``peer``."""
        outbox = self._shard.handle(peer, message)
        if isinstance(message, wire.Explain) and self.gate.holds(peer, message.about):
            text = f"waits for the standby of server {self._shard.rank}, which has not stored it"
            return [(peer, wire.Explanation(message.seq, text))]
        return self.answer(outbox)

    def depart(self, workers: Collection[int]) -> Outbox:
        """Note which workers have left in order."""
        return self.answer(self._shard.depart(workers))

    def answer(self, outbox: Outbox) -> Outbox:
        """Return what of ``outbox``, which the shard has just returned, may leave now."""
        if not self._gates or self.journal is None:
            return outbox
        return self.gate.take(outbox, self.journal.newest, self.journal.stored)

    def pair(self, epoch: int, empty: bool, send: Callable[[wire.Record], None]) -> Outbox:
        """Have a standby from now on; return what waited for the one before.

        Args:
            epoch: of the view.
            empty: whether both are new, so that the standby has all that this one has.
            send: sends a record to the standby.
        """
        outbox = self.part()
        if empty:
            self._gates, self._synced_at = True, 0
            self.journal = Journal(epoch, send)
        else:
            self.journal = Journal(epoch, send, self._shard.capture())
        return outbox

    def part(self) -> Outbox:
        """Have no standby any more; return what waited for it."""
        self.journal, self._gates, self._synced_at = None, False, None
        return self.gate.open()

    def go_on(self) -> None:
        """Send the next piece of what a new standby lacks."""
        if self.journal is not None:
            self.journal.go_on()
            self._gate_if_caught_up(self.journal)

    def stored(self, message: wire.Stored) -> Outbox:
        """Take what the standby says that it has; return the answers that have waited for it.

        Raises:
            WireError: see ``Journal.store``.
        """
        journal = self.journal
        if journal is None:
            return []
        journal.store(message)
        self._gate_if_caught_up(journal)
        return self.gate.open(journal.stored)

    def _gate_if_caught_up(self, journal: Journal) -> None:
        """Let answers wait for the standby once it has the capture: then it is not far behind."""
        if not self._gates and journal.captured is not None and journal.stored >= journal.captured:
            self._gates, self._synced_at = True, journal.newest  # all answers so far rest on records up to the newest
