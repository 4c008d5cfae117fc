"""One of the two processes of a server's rank: primary, standby, or neither yet, as its views say. Pure.

Only the scheduler changes views. A process that serves nobody yet keeps what workers ask. When a view makes it the
primary, it applies the records that it has stored, and answers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Protocol

from kvstore import wire
from kvstore.transport.transport import Admission
from servers.replication.primary import Primary
from servers.replication.standby import SEATS, Standby
from servers.requests.guest_links import READER
from servers.requests.replies import Outbox
from servers.shard import Shard

MOST_READS = 256  # requests of readers that are kept; a reader asks again for others


class Replaced(Exception):
    """The rank of this process is another's: this one must not answer anybody any more."""


class Neighbors(Protocol):
    """The other processes to which a replica sends, other than in answer."""

    def link(self, address: str) -> None: ...  # to the standby, in place of any other

    def record(self, record: wire.Record) -> None: ...  # over that link

    def unlink(self) -> None: ...

    def tell(self, standing: wire.Standing) -> None: ...  # the scheduler


class Replica:
    """The part of this process in its rank: primary, standby, or neither yet. ``serves`` is whether it is the primary.

    If the standby leaves records unanswered for ``limit_s`` seconds, the scheduler is told that it is not in step.
    """

    def __init__(
        self, node: wire.Node, shard: Shard, admission: Admission, neighbors: Neighbors, limit_s: float = math.inf
    ) -> None:
        self.serves = False
        self._node = node
        self._shard = shard
        self._neighbors = neighbors
        self.primary = Primary(shard)
        self._standby = Standby(shard.apply, admission)
        self._held = HeldRequests()
        self._held_reads = HeldRequests()  # of readers
        self._view: wire.View | None = None
        self._roster = wire.Roster(0, [])  # the last one of the scheduler
        self._bypassed: set[int] = set()  # the aggregators that are lost, as the scheduler or a worker says
        self._told: wire.Standing | None = None
        self._limit_s = limit_s
        self._waits = (0, 0.0)  # for which record to be stored, and since when, as far as ``stand`` has seen

    # ---- what comes

    def handle(self, peer: bytes, message: wire.Message) -> Outbox:
        if isinstance(message, wire.Record):
            if self._view is not None and self.serves:  # from a primary before this one
                return [(peer, wire.Stored(self._view.epoch, 0))]
            return self._standby.take(peer, message)
        if isinstance(message, wire.Here) and message.node.role in SEATS:
            if not self.serves:
                self._standby.here(peer, message.node)
            return []
        if self.serves:
            return self.primary.handle(peer, message)
        return self._hold(peer, message)

    def stored(self, message: wire.Stored) -> Outbox:
        """Take what the standby has stored; raise ``Replaced`` if it serves this rank itself."""
        if self._view is not None and message.epoch > self._view.epoch:
            raise Replaced(f"server {self._node.rank} is served by another process, in view {message.epoch}")
        outbox = self.primary.stored(message)
        self._say_if_synced()
        return outbox

    def link_made_anew(self) -> None:
        """Resend to the standby the records that it has not stored."""
        if self.primary.journal is not None:
            self.primary.journal.send_again()

    def look(self, view: wire.View) -> Outbox:
        """Take a view of this rank; raise ``Replaced`` if it names this process neither as primary nor as standby."""
        before = self._view
        if before is not None and view.epoch <= before.epoch:
            return []
        self._view = view
        if view.primary == self._node:
            return self._lead(view, before)
        if self.serves or view.standby != [self._node.role, self._node.incarnation]:
            raise Replaced(f"server {view.primary.rank} is served by another process, in view {view.epoch}")
        return self._standby.look(view)

    def depart(self, roster: wire.Roster) -> Outbox:
        """Note who has left in order, who is lost, and who has come; see ``Shard``.

        A standby hears of it from its primary, in the order of changes.
        """
        self._roster = roster
        self._bypassed.update(roster.aggregators)
        return self._tell() if self.serves else []

    # ---- time

    @property
    def busy(self) -> bool:
        return self._standby.ready or self.primary.capturing

    def go_on(self) -> None:
        """Do a part of the work between messages: apply a record, or send a piece of the capture."""
        self._standby.go_on()
        self.primary.go_on()
        self._say_if_synced()

    def stand(self, now: float | None = None) -> None:
        """Tell the scheduler how this rank stands, if this process serves it.

        At times it is called for ``now`` alone.
        """
        if self._view is None or not self.serves:
            return
        primary = self.primary
        synced = primary.synced and not (now is not None and self._overdue(now))
        self._told = wire.Standing(self._node, self._view.epoch, self._shard.rounds, synced, primary.nbytes)
        self._neighbors.tell(self._told)

    # ---- helpers

    def _lead(self, view: wire.View, before: wire.View | None) -> Outbox:
        """Be the primary, with the standby that ``view`` names; ``before`` is the view before."""
        served = self.serves
        if not served:
            self._standby.catch_up()
            self.serves = True
        outbox: Outbox = []
        if view.standby is None:
            self._neighbors.unlink()
            outbox = self.primary.part()
        elif not served or before is None or before.standby != view.standby:
            self._neighbors.link(view.standby_address)
            outbox = self.primary.pair(view.epoch, view.synced and before is None, self._neighbors.record)
        if not served:
            if any(self._roster.told) or self._bypassed:
                outbox += self._tell()
            for peer, request in (*self._held.release(), *self._held_reads.release()):
                outbox += self.primary.handle(peer, request)
        self.stand()
        return outbox

    def _hold(self, peer: bytes, message: wire.Message) -> Outbox:
        if isinstance(message, wire.Request) and message.node.role == READER:
            if len(self._held_reads) < MOST_READS:  # a reader may hear of a view sooner than this process does
                self._held_reads.add(peer, message)
            return []
        refusal = self._shard.refusal(peer, message)
        if refusal is not None:
            return refusal
        if isinstance(message, wire.Explain):
            return [(peer, wire.Explanation(message.seq, self._why()))]
        if isinstance(message, wire.Request):
            self._held.add(peer, message)
        elif (aggregator := self._shard.bypassed(message)) is not None:
            self._bypassed.add(aggregator)  # once all records of the primary are applied
        return []

    def _tell(self) -> Outbox:
        return self.primary.depart(replace(self._roster, aggregators=sorted(self._bypassed)))

    def _why(self) -> str:
        rank = self._node.rank
        if self._view is None:
            return f"waits for the scheduler, which has not said which process serves server {rank}"
        return f"waits for the standby of server {rank}, which has not taken over yet"

    def _overdue(self, now: float) -> bool:
        """Return whether the standby has stored nothing for too long while records wait.

        Answers go on waiting for it.
        """
        journal = self.primary.journal
        waits = 0 if journal is None or journal.stored == journal.newest else journal.stored + 1
        if waits != self._waits[0] or not waits:
            self._waits = waits, now
        return now - self._waits[1] > self._limit_s

    def _say_if_synced(self) -> None:
        if self.primary.synced and self._told is not None and not self._told.synced:
            self.stand()


class HeldRequests:
    """Requests that came before this process serves its rank: kept in order, each once, with its last link.

    Workers hear of a new primary from the scheduler, perhaps before that primary does. They resend over a new link the
    requests without an answer, so there is never more here than they wait for. A request that its sender has an answer
    for is forgotten, or never kept.
    """

    def __init__(self) -> None:
        self._requests: dict[tuple[wire.Node, int], tuple[bytes, wire.Request]] = {}
        self._done: dict[wire.Node, int] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, peer: bytes, request: wire.Request) -> None:
        node, seq, done = request.sender
        if done > self._done.get(node, 0):
            self._done[node] = done
            for old in [key for key in self._requests if key[0] == node and key[1] < done]:
                if self._requests[old][1].remembered:  # others may have no answer yet
                    del self._requests[old]
        if seq >= self._done.get(node, 0) or not request.remembered:
            self._requests[node, seq] = peer, request  # a repeat keeps its place

    def release(self) -> list[tuple[bytes, wire.Request]]:
        """Return, and forget, all of them, in the order in which they came."""
        requests = list(self._requests.values())
        self._requests.clear()
        return requests
