"""Whether a job has failed, and why; how the scheduler learns that a member has ended. Pure.

The launcher reports a loss, or the member has been silent for too long. A lost member fails the job, but for a server
that has a standby in step, a standby, and, with --min-workers, an aggregator and a worker without which enough workers
are left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvstore import wire
from kvstore.errors import NodeLost
from kvstore.job.contract import process_name
from kvstore.rare_log import Drops
from servers.requests.replies import refuse
from servers.requests.reply_links import ReplyLinks
from servers.scheduler.departures import Departures
from servers.scheduler.failover import Failover
from servers.scheduler.members import JobMember, MemberEvent, Members, MemberState


class JobFailure:
    """The failure of one job, which its first cause makes. ``note`` takes a line for observers when the job fails.

    ``cause`` is the process whose loss has failed it, by name, if the launcher lets that process die; else it is empty.
    """

    def __init__(
        self, members: Members, send: Callable[[bytes, wire.Message], None], note: Callable[[float, str], None]
    ) -> None:
        self.text: str | None = None
        self.cause = ""
        self.at = 0.0
        self._members = members
        self._send = send
        self._note = note

    def happen(self, text: str, now: float, cause: str = "") -> None:
        """Let the job fail: tell all members that are still there why. Only the first call counts."""
        if self.text is not None:
            return
        self.text, self.at, self.cause = text[: wire.MAX_REASON], now, cause
        self._note(now, f"the job has failed: {self.text}"[: wire.MAX_REASON])
        failed = self.told()
        for member in self._members.everyone:
            if member.state is MemberState.READY and member.peer is not None:
                self._send(member.peer, failed)
            elif member.state is MemberState.JOINED:
                self._members.happens(member, MemberEvent.LEAVES)
                joining = wire.Leave(
                    wire.Sender(wire.Node(member.role, member.hint, member.nonce), member.join_seq, 0), error=None
                )
                self._send(member.join_peer, refuse(member.join_peer, joining, NodeLost(self.text, cause)).reply)

    def told(self) -> wire.JobFailed:
        return wire.JobFailed(self.text or "", self.cause)

    def check(self) -> None:
        if self.text is not None:
            raise NodeLost(self.text, self.cause)


log = logging.getLogger(__name__)


# How a loss is heard of, and which way counts:
#
#     the launcher's report    at once, with how the process ended; only for processes that it has started
#     silence                  after ``limit_s``: a process on a lost host, a stopped one, a cut line
#     its server's report      of a standby: alive for the scheduler, and out of reach for the only process that needs
#     it
#     a later start            its seat is taken: the report was lost, or is still on its way
#
# The first one counts, because ``Members.happens`` makes each transition once.
class Losses:
    """The losses of one job.

    Args:
        key: the scheduler's own public key; empty where links prove no keys.
        least: the job goes on without workers that are lost as long as so many are not; 0 if it does not at all.
        without: called with a worker or an aggregator that is lost, and without which the job goes on.
        may_come: whether below the least the job waits for workers that are started again.
        may_be_added: whether others may take the places of those that are not.
    """

    def __init__(
        self,
        members: Members,
        reply_links: ReplyLinks,
        failover: Failover,
        key: str,
        failure: JobFailure,
        least: int,
        without: Callable[[JobMember], object],
        departures: Departures,
        may_come: bool = False,
        may_be_added: bool = False,
    ) -> None:
        self._members = members
        self._reply_links = reply_links
        self._failover = failover
        self._key = key
        self._failure = failure
        self._least, self._without = least, without
        self._departures, self._may_come, self._may_be_added = departures, may_come, may_be_added
        self._for_good: set[int] = set()  # of the lost workers, those that are not started again
        self._came: dict[int, int] = {}  # by rank, the last incarnation of workers that were started again
        self._silent: dict[int, str] = {}  # by rank: the processes of lost workers that nobody has seen end
        self.news: list[str] = []
        self._drops = Drops(log)

    def report(self, peer: bytes, lost: wire.Lost, now: float) -> None:
        member = self._members.find(lost.role, lost.rank)
        who = f"{lost.role} {lost.rank}" if lost.role != "scheduler" else "the scheduler"
        if not self._may_report(self._reply_links.key(peer), member):
            self._drops.note(f"a report that {who} {lost.how}", "it came over a link with another member's key")
            return
        if self._members.restarts(lost.role):
            self.end(lost, now)
            return
        if member is not None:
            if lost.role == "worker":
                if 0 < lost.start < member.start:
                    return  # it has been started again meanwhile
                self._silent.pop(lost.rank, None)
            if member.state is MemberState.LOST:
                if lost.role != "worker" or not lost.final or self._may_go_on(member.rank, lost.final):
                    return  # it is known already
            elif self.spare(member, lost.how, lost.final):
                return  # the job goes on without it
            else:
                self._members.happens(member, MemberEvent.DIES)
        start = 1 if member is None else member.start
        cause = process_name(lost.role, lost.rank, start) if self._least and lost.role == "worker" else ""
        self._failure.happen(f"{who} {lost.how}{self._too_few(lost.role, lost.rank)}", now, cause)

    def retire(self, peer: bytes, message: wire.Retire, now: float) -> None:
        """Let a process of a rank with a standby end in order when it can, because the launcher moves it."""
        member = self._members.find(message.role, message.rank)
        if not self._may_report(self._reply_links.key(peer), member):
            who = f"start {message.start} of {message.role} {message.rank}"
            self._drops.note(f"an order to retire {who}", "it came over a link with another member's key")
            return
        if member is None or member.state is not MemberState.READY or member.start != message.start:
            return  # it has ended: the launcher starts the next one
        if self._members.restarts(member.role) and self._failure.text is None:
            self._failover.retire(member, now)

    def spare(self, member: JobMember, how: str, final: bool = False) -> bool:
        """Let the job go on without ``member``, which ``how``; return False, and change nothing, if it cannot.

        Below the least it waits for workers that may come back. ``final``: this one does not.
        """
        if not self._least or not self._members.complete or self._failure.text is not None:
            return False
        if member.role == "aggregator":
            return self._spare_aggregator(member, how)
        return member.role == "worker" and self._spare_worker(member, how, final)

    def _spare_aggregator(self, member: JobMember, how: str) -> bool:
        # Not always: sums of floats are made host by host, then over hosts. Without one, the last bits may differ, and
        # a job that has not asked to go on without members must give the same bits each time.
        if not self._members.happens(member, MemberEvent.DIES):
            return False
        if self._members.all_gone("worker"):
            return True  # nobody needs it any more
        self.news.append(
            f"aggregator {member.rank}{_of_host(member)} {how}; the workers of its host send to the servers themselves "
            "from now on"
        )
        self._without(member)
        return True

    def _spare_worker(self, member: JobMember, how: str, final: bool) -> bool:
        left, all_ = self._left(member.rank)
        event = MemberEvent.FAILS if member.state is MemberState.LEFT else MemberEvent.DIES
        if not self._may_go_on(member.rank, final) or not self._members.happens(member, event):
            return False
        goes_on = f"the job goes on with {left} of {all_} workers"
        waits = f"the job waits: {left} of {all_} workers are left, and it needs {self._least} (--min-workers)"
        self.news.append(
            f"worker {member.rank} {how}; {waits if left < self._least and not self._departures.left else goes_on}"
        )
        self._without(member)
        return True

    def comes(self, member: JobMember) -> bool:
        """Note that a worker has been started again or added, as ``member``; return False if that is known."""
        if self._came.get(member.rank, 1) >= member.incarnation:
            return False
        self._came[member.rank] = member.incarnation
        self._silent.pop(member.rank, None)
        self._for_good.discard(member.rank)
        how = "started again" if member.start > 1 else "added"
        self.news.append(f"{member.node} has been {how}, and is to be let in")
        return True

    @property
    def given_up(self) -> list[str]:
        """The processes of lost workers that may run, each with those that are started after it.

        They have been silent, and nobody has seen them end; or they are started again just now, and have not joined.
        """
        lost = [member for member in self._members.of("worker") if member.state is MemberState.LOST]
        return [
            self._silent.get(member.rank) or process_name(member.role, member.rank, member.start + 1) for member in lost
        ]

    def take_news(self) -> list[str]:
        news, self.news = self.news, []
        return news

    def silent(self, member: JobMember, now: float) -> None:
        silent = f"has been silent for {now - member.heard:.1f} s"
        if self.spare(member, f"{silent}{_known(member)}"):
            if member.role == "worker":
                self._silent[member.rank] = process_name(member.role, member.rank, member.start)
            return
        self._members.happens(member, MemberEvent.DIES)
        if self._members.restarts(member.role):
            self.lose(member, silent, now)
        else:
            too_few = self._too_few(member.role, member.rank)
            self._failure.happen(f"{member.node} is lost: it {silent}{_known(member)}{too_few}", now)

    def _left(self, rank: int) -> tuple[int, int]:
        """Return how many workers are in without worker ``rank``, and how many the job has."""
        all_ = self._members.wanted["worker"]
        return all_ - len(self._departures.lost.keys() | {rank}), all_

    def _may_go_on(self, rank: int, final: bool) -> bool:
        """Whether enough workers are in without worker ``rank``, or may be when those have come that can."""
        if final:
            self._for_good.add(rank)
        left, all_ = self._left(rank)
        if left >= self._least or self._may_be_added:
            return True
        return self._may_come and all_ - len(self._for_good) >= self._least

    def _too_few(self, role: str, rank: int) -> str:
        """Say why the job does not go on without a worker, if it might have."""
        if role != "worker" or not self._least or not self._members.complete:
            return ""
        left, all_ = self._left(rank)
        return f"; {left} of {all_} workers are left, and the job needs {self._least} (--min-workers)"

    def end(self, lost: wire.Lost, now: float) -> None:
        """The process of a member that may be started again has ended, perhaps for good."""
        member = self._members.end(lost.role, lost.rank, lost.start)
        node = wire.Node(lost.role, lost.rank, lost.start)
        if self._members.complete:
            if lost.final and self._failure.text is None and not self._members.all_gone("worker"):
                self._failover.views.give_up(node, lost.how)
            if member is not None:
                self.lose(member, lost.how, now)
        elif lost.final:
            self._failure.happen(f"{node} {lost.how}", now, process_name(*node))
        elif member is not None:
            log.warning("%s %s before all had joined", node, lost.how)

    def lose(self, member: JobMember, how: str, now: float) -> None:
        """Let a server's rank go on without ``member``, which has left or died, or else let the job fail."""
        if self._failure.text is None and not self._members.all_gone("worker"):
            why = self._failover.lose(member, how, now)
            if why:
                self._failure.happen(why, now, process_name(member.role, member.rank, member.start))

    def stand(self, peer: bytes, standing: wire.Standing, now: float) -> None:
        member = self._members.identify(standing.node)
        if member is None or member.state is not MemberState.READY:
            return  # its next heartbeat is answered
        if not self._reply_links.admit(peer, standing, member.key):
            return
        standby = self._failover.unanswering(standing)
        if standby is not None and self._members.happens(standby, MemberEvent.DIES):
            self.lose(standby, "does not answer its server", now)
        self._failover.stand(standing, now)

    def _may_report(self, key: str, about: JobMember | None) -> bool:
        """Return whether the holder of ``key`` may report that a member has ended.

        Only the launcher may, which has all keys. It uses the key of that member, or the scheduler's. The key of a
        member that has not joined is one that nobody has joined with.
        """
        if not key or key == self._key:
            return True
        if about is not None:
            return key == about.key
        return not self._members.has_joined(key)


def _of_host(member: JobMember) -> str:
    return f" on {member.host}" if member.host else ""


def _known(member: JobMember) -> str:
    if member.stopped is None:
        return ""
    place = f", and was at {member.stopped.place} at its last beat" if member.stopped.place else ""
    return f"; it {member.stopped.doing}{place}"
