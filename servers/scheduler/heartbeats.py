"""Signs of life, and what members are told in return. Pure.

At its first heartbeat over a new link a member gets again each announcement that it may have missed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvstore import wire
from kvstore.job.contract import process_name
from kvstore.wire.members import MemberNotice
from servers.requests.reply_links import ReplyLinks
from servers.scheduler.departures import Rosters
from servers.scheduler.failover import Failover
from servers.scheduler.losses import JobFailure
from servers.scheduler.members import JobMember, Members, MemberState
from servers.scheduler.newcomers import Newcomers


class Heartbeats:
    """The signs of life of one job's members. Members are to note the rounds ``traced``, if an observer has asked."""

    def __init__(
        self,
        members: Members,
        reply_links: ReplyLinks,
        failover: Failover,
        rosters: Rosters,
        send: Callable[[bytes, wire.Message], None],
        failure: JobFailure,
        newcomers: Newcomers,
        start: int = 1,
    ) -> None:
        self._members = members
        self._reply_links = reply_links
        self._failover = failover
        self._rosters = rosters
        self._send = send
        self._failure = failure
        self._newcomers = newcomers
        self._start = start
        self._faults = 0
        self.traced = [0, 0]

    def beat(self, peer: bytes, message: wire.Beat, now: float) -> None:
        """Take a member's heartbeat, and send what it may have missed; a process that is no member is told why."""
        member = self._members.identify(message.node)
        if member is None or member.state is MemberState.LOST or not self._reply_links.admit(peer, message, member.key):
            self._disown(peer, message.node)
            return
        if peer != member.peer:  # a new link; notices that went over the old one may be lost
            member.peer, member.epoch, member.viewed = peer, 0, 0
        self._members.hear(member, now)
        member.beaten = now
        failure = self._failure.text
        if failure is not None and member.state is MemberState.READY:
            self._send(peer, self._failure.told())
        self._send(peer, wire.Alive(message.sent, now if message.sent else 0.0, self._start, self.traced))
        self.tell(member)
        if failure is None:
            self._failover.show(member)
            self._rosters.inform(member)
            self._newcomers.tell(member)

    def trace(self, rounds: list[int]) -> None:
        """Have members trace other rounds: at once, or at their next heartbeat if this does not reach them."""
        self.traced = rounds
        told = wire.Alive(start=self._start, traced=rounds)
        for member in self._members.everyone:
            if member.state is MemberState.READY and member.peer is not None:
                self._send(member.peer, told)

    def pulse(self, peer: bytes, message: wire.ProcessAlive, now: float) -> None:
        """Take a sign of life from beside a member's process."""
        member = self._members.identify(message.node)
        if member is None or not self._reply_links.admit(peer, message, member.key):
            return
        member.pulse_peer, member.pulsed, member.stopped = peer, now, None
        if member.state is MemberState.READY:
            self._members.hear(member, now)

    def is_from_member(self, peer: bytes, message: MemberNotice) -> bool:
        """Whether ``message`` is of the member that it names: over the link of that member's latest heartbeat."""
        member = self._members.identify(message.node)
        return member is not None and member.state is MemberState.READY and member.peer == peer

    def tell(self, member: JobMember) -> None:
        """Send the notices that wait for a member; without a link to it yet, they go at its first heartbeat."""
        if member.peer is not None:
            for notice in member.notices:
                self._send(member.peer, notice)
            member.notices.clear()

    def blame(self, fault: wire.Fault) -> None:
        """Tell rank 0 what is wrong with a call of its own that was answered before."""
        owner = self._members.find("worker", 0)
        if owner is not None:
            self._faults += 1
            owner.notices.append(replace(fault, number=self._faults))
            self.tell(owner)

    def _disown(self, peer: bytes, node: wire.Node) -> None:
        """Tell a process that it is no member: of a server's seat, by a view that does not name it."""
        member = self._members.identify(node)
        given_up = None if member is None else (member.role, member.state)
        spared = ("worker", MemberState.LOST), ("aggregator", MemberState.LOST)
        if member is not None and given_up in spared and self._failure.text is None:
            own = process_name(member.role, member.rank, member.start)
            self._send(peer, wire.JobFailed(f"{node} {wire.GIVEN_UP}", own))
            return
        seat = self._members.find(node.role, node.rank) if self._members.restarts(node.role) else None
        view = self._failover.view(node.rank)
        if seat is None or view is None or self._reply_links.key(peer) != seat.key:
            self._send(peer, wire.JobFailed(f"{node} is not a member of this job, or was given up"))
        elif self._failure.text is not None:  # why it has failed, and not that this process was given up
            self._send(peer, self._failure.told())
        else:
            self._send(peer, wire.Stop() if self._rosters.over else view)
