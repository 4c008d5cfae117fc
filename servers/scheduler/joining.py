"""How members join: who asks, who is still missing, and who is welcomed when. Pure: the time is passed in."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvstore import wire
from kvstore.errors import UsageError
from servers.requests.reply_links import ReplyLinks
from servers.scheduler.failover import Failover
from servers.scheduler.member import JobMember
from servers.scheduler.members import Members
from servers.scheduler.welcomes import Welcomes

log = logging.getLogger(__name__)

REMIND_S = 60.0  # between two log lines that say who has not joined yet


class JoinRequests:
    """The requests to join one job.

    Args:
        members: of the job.
        reply_links: of the members.
        failover: is told of servers' processes that were started again.
        tell: sends a message over a link.
    """

    def __init__(
        self,
        members: Members,
        reply_links: ReplyLinks,
        failover: Failover,
        tell: Callable[[bytes, wire.Message], None],
    ) -> None:
        self._members = members
        self._reply_links = reply_links
        self._failover = failover
        self._tell = tell
        self._welcomes: Welcomes | None = None  # once all have joined
        self._remind_at: float | None = None

    @property
    def servers(self) -> list[str]:
        """The address of who serves each server's rank, as it is now; empty until all have joined."""
        return [] if self._welcomes is None else self._welcomes.servers

    def predecessor(self, peer: bytes, request: wire.Join) -> JobMember | None:
        """Return who has ended, as ``request`` of a later start in the same seat shows; None if nobody has."""
        role, rank, _ = request.node
        before = self._members.find(role, rank) if self._members.restarts(role) else None
        if before is None or before.start >= request.start or before.key != self._reply_links.key(peer):
            return None
        return before

    def join(self, peer: bytes, request: wire.Join, now: float) -> None:
        """Let a process in, or note that it has asked again.

        Raises:
            UsageError: see ``Members.join``; or another process has joined in its name.
        """
        role, hint, nonce = request.node
        member = self._members.by_nonce(nonce)
        if member is not None:
            if not self._reply_links.admit(peer, request, member.key):
                raise UsageError("a process with another key has asked to join in this name")
            member.join_peer, member.join_seq = peer, request.seq
            self._welcome(member)
            return
        key = self._reply_links.key(peer)
        member = JobMember(
            role,
            nonce,
            hint,
            request.address,
            peer,
            request.seq,
            key,
            request.aggregator,
            request.start,
            request.host,
            request.pid,
        )
        before = self._members.join(member, now)
        self._reply_links.admit(peer, request, key)
        if before is not None:
            self._welcome(member)
            if not self._members.all_gone("worker"):
                self._failover.join(member, now)
        elif self._members.settle(now):
            log.info("all members have joined")
            self._welcomes = Welcomes(self._members)
            self._failover.begin(self._welcomes)
            for other in self._members.everyone:
                self._welcome(other)

    def withdraw(self, member: JobMember, request: wire.Leave) -> None:
        """Let a process go that has not been welcomed yet."""
        self._members.withdraw(member)
        self._reply_links.forget(wire.Node(member.role, member.hint, member.nonce))
        log.warning("a %s has left before all had joined: %s", member.role, request.error)

    def remind(self, now: float) -> None:
        """Log, now and then, who has not joined yet."""
        if self._remind_at is None:
            self._remind_at = now + REMIND_S
        elif now >= self._remind_at:
            self._remind_at = now + REMIND_S
            log.warning("the scheduler waits for %s to join", self._members.absent())

    def _welcome(self, member: JobMember) -> None:
        if self._welcomes is not None:
            self._tell(member.join_peer, self._welcomes.of(member))
