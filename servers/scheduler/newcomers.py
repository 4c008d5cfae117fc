"""Workers that were started again, from their request to be let in until they are. Pure.

Such a worker begins its program anew, and waits before its first push. One of the others, its sponsor, lets it in:
before its own next push that begins with the same segment, it tells all servers, and then the scheduler, how often it
has pushed everything. The newcomer is in the rounds after these. So both are at the same place of their programs, and
no round waits for the newcomer before it can push.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore import wire
from kvstore.errors import NodeLost
from servers.names import have, name
from servers.requests.reasons import Reason
from servers.requests.replies import Answer, refuse
from servers.scheduler.departures import Departures
from servers.scheduler.members import JobMember, Members, MemberState


class Newcomers:
    """The workers of one job that wait to be let in. ``send`` takes a link, and what to send over it."""

    def __init__(self, members: Members, departures: Departures, send: Callable[[bytes, wire.Message], None]) -> None:
        self._members, self._departures, self._send = members, departures, send
        self._waiting: dict[int, tuple[bytes, wire.Enter]] = {}  # by rank
        self._sponsors: dict[int, int] = {}  # by rank, likewise: who is to let it in

    def enter(self, peer: bytes, request: wire.Enter) -> list[Answer]:
        """Let a worker wait for its sponsor."""
        self._waiting[request.node.rank] = peer, request
        return self._ask(request.node.rank)

    def admitted(self, message: wire.Admitted) -> Answer | None:
        """A sponsor has let a worker in: return what the worker is answered; None if it is lost again."""
        waits = self._waiting.get(message.rank)
        if waits is None or waits[1].node.incarnation != message.incarnation:
            return None
        peer, request = self._waiting.pop(message.rank)
        self._sponsors.pop(message.rank, None)
        told = (message.stores, message.barriers, message.joins, message.counts, message.ids, message.clocks)
        return Answer(peer, request, wire.Entered(request.seq, *told, message.state))

    def lose(self, rank: int) -> list[int]:
        """Worker ``rank`` is lost; return the newcomers that it was about to let in, of which servers may know."""
        self._forget(rank)
        return [newcomer for newcomer, sponsor in self._sponsors.items() if sponsor == rank]

    def give_up(self, newcomer: int, error: Exception) -> list[Answer]:
        """Return the answer to one that waits in vain."""
        peer, request = self._waiting[newcomer]
        self._forget(newcomer)
        return [refuse(peer, request, error)]

    def leave(self, rank: int) -> list[Answer]:
        """Worker ``rank`` has left in order: another one lets those in that have waited for it."""
        self._forget(rank)
        waiting = [newcomer for newcomer, sponsor in self._sponsors.items() if sponsor == rank]
        return [answer for newcomer in waiting for answer in self._ask(newcomer)]

    def of_sponsor(self, rank: int) -> wire.Newcomer | None:
        """Return one of the newcomers that worker ``rank`` is to let in; None if there is none."""
        return next((self._notice(newcomer) for newcomer, by in self._sponsors.items() if by == rank), None)

    def _notice(self, newcomer: int) -> wire.Newcomer:
        _, request = self._waiting[newcomer]
        return wire.Newcomer(newcomer, request.node.incarnation, request.store, request.id)

    def tell(self, member: JobMember) -> None:
        """Tell a sponsor again whom to let in; a notice may have been lost with its link."""
        for newcomer, sponsor in self._sponsors.items():
            if member.role == "worker" and sponsor == member.rank and member.peer is not None:
                self._send(member.peer, self._notice(newcomer))

    def explain(self, rank: int, seq: int) -> Reason:
        waits = self._waiting.get(rank)
        if waits is None or waits[1].seq != seq:
            return Reason()
        sponsor = self._sponsors[rank]
        return Reason(f"waits for worker {sponsor} to let it in, before the next push like its own", [sponsor])

    def _ask(self, newcomer: int) -> list[Answer]:
        """Have the lowest rank that is in let a worker in, or tell this one that nobody is left."""
        for member in self._members.of("worker"):
            if member.state is MemberState.READY and member.rank not in self._departures.lost:
                self._sponsors[newcomer] = member.rank
                self.tell(member)
                return []
        return self.give_up(newcomer, NodeLost("no worker is left that could let this one in: the others have ended"))

    def _forget(self, rank: int) -> None:
        self._waiting.pop(rank, None)
        self._sponsors.pop(rank, None)


class Shortage:
    """Whether fewer workers than the job needs are in, since when, and who waits for more of them.

    Then the sponsor of newcomers stands still before its next push, and with it all rounds. It goes on when enough are
    in, or as far as the place where the next newcomer waits for it.

    Args:
        least: how many workers the job needs; 0 if it does not go on without lost ones.
        patience_s: how long it waits for more.
    """

    def __init__(
        self, members: Members, departures: Departures, newcomers: Newcomers, least: int, patience_s: float
    ) -> None:
        self._members, self._departures, self._newcomers = members, departures, newcomers
        self._least, self._patience_s = least, patience_s
        self._since: float | None = None
        self._waiting: dict[int, tuple[bytes, wire.AwaitWorkers]] = {}  # by rank

    @property
    def left(self) -> tuple[int, int]:
        """How many workers are in, and how many the job has."""
        all_ = self._members.wanted["worker"]
        return all_ - len(self._departures.lost), all_

    def wait(self, peer: bytes, request: wire.AwaitWorkers) -> list[Answer]:
        self._waiting[request.node.rank] = peer, request
        return []

    def look(self, now: float) -> list[Answer]:
        """Take note of who is in now; return the answers to those that are to go on."""
        # Once a worker has left in order the job comes to its end, and nobody comes any more.
        short = self._members.complete and not self._departures.left and self.left[0] < self._least
        self._since = None if not short else now if self._since is None else self._since
        answers = []
        for rank, (peer, request) in list(self._waiting.items()):
            newcomer = self._newcomers.of_sponsor(rank)
            if newcomer is not None or not short:
                told = () if newcomer is None else (newcomer.rank, newcomer.incarnation, newcomer.store, newcomer.id)
                answers.append(Answer(peer, request, wire.GoOn(request.seq, *told)))
                del self._waiting[rank]
        return answers

    def overdue(self, now: float) -> str:
        """Return why the job fails now, because nobody has come for too long; empty if it does not."""
        if self._since is None or now - self._since <= self._patience_s:
            return ""
        lost = self._departures.lost.keys()
        late = f"{name('worker', lost)} {have(lost)} not come back within {self._patience_s:g} s (KVSTORE_PATIENCE_S)"
        return f"{self._text}: {late}"

    def explain(self, rank: int, seq: int) -> Reason:
        waits = self._waiting.get(rank)
        if waits is None or waits[1].seq != seq:
            return Reason()
        lost = sorted(self._departures.lost)
        return Reason(f"waits for {name('worker', lost)} to come back: {self._text}", lost)

    @property
    def _text(self) -> str:
        left, all_ = self.left
        return f"{left} of {all_} workers are left, and the job needs {self._least} (--min-workers)"
