"""Questions where members are in their code: which are asked, what they answer, and what is known of the others.

Pure: the time is passed in. A question goes over the link of a member's heartbeat, whose thread answers whatever the
member's other threads do. It also goes to the process that beats beside the member, which tells what it knows when the
heartbeat cannot: that the process is stopped, or where it was before a call that keeps the interpreter's lock.

Several questions about one member are asked once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

from kvstore import wire
from kvstore.wire.guests import MOST_LOCATED, UNASKED
from servers.requests.reply_links import ReplyLinks
from servers.scheduler.members import JobMember, Members, MemberState

ANSWER_S = 1.5  # how long a member may take to answer
# Questions that are under way at once; of more, the oldest is answered with what is known. Each late worker asks one,
# and a stopped server makes thousands of workers late in the same second.
MOST_LOOKS = 256


class Sighting(NamedTuple):
    """Where a member is: words that follow its name, and the stacks that it has answered; None if it has not."""

    words: str
    stacks: wire.Stacks | None = None


Found: TypeAlias = Callable[[Mapping[int, Sighting]], None]


@dataclass(eq=False)
class _Look:
    """A question about members of one role: what is known by rank, and the ranks that have not answered."""

    role: str
    until: float
    found: Found
    sightings: dict[int, Sighting] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)


@dataclass
class _MemberQuestion:
    """A member that has been asked and has not answered; ``beside`` is the answer of the process beside it."""

    number: int
    at: float
    beside: wire.Stacks | None = None


class Inquiries:
    """The questions of one job."""

    def __init__(self, members: Members, reply_links: ReplyLinks, send: Callable[[bytes, wire.Message], None]) -> None:
        self._members = members
        self._reply_links = reply_links
        self._send = send
        self._number = 0
        self._looks: list[_Look] = []  # in the order of their limits
        self._asked: dict[tuple[str, int], _MemberQuestion] = {}
        self._links: dict[
            tuple[wire.Node, int], bytes
        ] = {}  # by asker and number of a ``Locate``: the link for its answer

    def locate(self, peer: bytes, message: wire.Locate, now: float) -> None:
        """Take a ``Locate``; send the answer over ``peer`` when it is there. Observers get the stacks, too."""
        asker = message.node, message.seq
        repeated = asker in self._links
        self._links[asker] = peer
        if not repeated:
            self.look(message.role, message.ranks, now, partial(self._located, message))

    def look(self, role: str, ranks: Sequence[int], now: float, found: Found) -> None:
        """Ask the first ``MOST_LOCATED`` of these members where they are.

        Args:
            found: is called once, with what is known of each, in the order of ranks: now, or when all have answered, or
                after ``ANSWER_S``.
        """
        look = _Look(role, now + ANSWER_S, found)
        for rank in ranks[:MOST_LOCATED]:
            member = self._members.find(role, rank)
            words = _absence(member)
            if member is None or words:
                look.sightings[rank] = Sighting(words)
            else:
                look.waiting.add(rank)
                self._ask(member, now)
        if not look.waiting:
            self._finish(look, now)
            return
        self._looks.append(look)
        if len(self._looks) > MOST_LOOKS:
            self._finish(self._looks.pop(0), now)

    def take(self, peer: bytes, stacks: wire.Stacks, now: float) -> None:
        """Take a member's answer, or what the process beside it says unasked. The link must be the member's."""
        role, rank, _ = stacks.node
        asked, member = self._asked.get((role, rank)), self._members.identify(stacks.node)
        if member is None or (stacks.number != UNASKED and (asked is None or asked.number != stacks.number)):
            return
        if not self._reply_links.admit(peer, stacks, member.key):
            return
        if asked is None or stacks.number == UNASKED:
            if peer == member.pulse_peer:
                member.stopped = stacks
            return
        if peer == member.pulse_peer:
            asked.beside = stacks
            return
        del self._asked[role, rank]
        for look in [look for look in self._looks if look.role == role and rank in look.waiting]:
            look.waiting.discard(rank)
            look.sightings[rank] = Sighting(_place(stacks), stacks)
            if not look.waiting:
                self._looks.remove(look)
                self._finish(look, now)

    def tick(self, now: float) -> None:
        while self._looks and self._looks[0].until <= now:
            self._finish(self._looks.pop(0), now)

    def due(self) -> float | None:
        return self._looks[0].until if self._looks else None

    # ---- helpers

    def _ask(self, member: JobMember, now: float) -> None:
        if (member.role, member.rank) in self._asked or member.peer is None:
            return
        self._number += 1
        self._asked[member.role, member.rank] = _MemberQuestion(self._number, now)
        self._send(member.peer, wire.Where(self._number))
        if member.pulse_peer is not None:
            self._send(member.pulse_peer, wire.Where(self._number))

    def _finish(self, look: _Look, now: float) -> None:
        for rank in look.waiting:
            asked, member = self._asked.get((look.role, rank)), self._members.find(look.role, rank)
            look.sightings[rank] = Sighting(_silence(member, asked, now))
            if not any(other.role == look.role and rank in other.waiting for other in self._looks):
                self._asked.pop((look.role, rank), None)
        look.found(dict(sorted(look.sightings.items())))

    def _located(self, message: wire.Locate, sightings: Mapping[int, Sighting]) -> None:
        peer = self._links.pop((message.node, message.seq))
        buffers = []
        if message.node.role == "observer":
            buffers = [wire.encode(seen.stacks)[0] for seen in sightings.values() if seen.stacks is not None]
        self._send(peer, wire.Located(message.seq, [*sightings], [seen.words for seen in sightings.values()], buffers))


def _absence(member: JobMember | None) -> str:
    """Say why a member cannot be asked; empty if it can."""
    if member is None:
        return "is not known"
    if member.state is MemberState.LEFT:
        return "has left the job"
    if member.state is MemberState.LOST:
        return "is lost"
    return "has not been heard yet" if member.peer is None else ""


def _place(stacks: wire.Stacks) -> str:
    return f"is at {stacks.place}" + (f", which {stacks.doing}" if stacks.doing else "")


def _silence(member: JobMember | None, asked: _MemberQuestion | None, now: float) -> str:
    words = _absence(member)
    if member is None or words or asked is None:
        return words or "has not said where it is"
    if member.beaten > asked.at:
        return f"is alive, and has not said in {ANSWER_S:g} s where it is"
    beside, silent_s = asked.beside, now - member.beaten
    if beside is None and member.pulsed <= member.beaten:
        busy = ", or in a call that keeps the interpreter's lock" if member.pulse_peer is None else ""
        return f"does not answer: no sign of life for {silent_s:.0f} s, so stopped{busy}, or not reached"
    doing = f"is in a call that keeps the interpreter's lock, it seems: no heartbeat for {silent_s:.0f} s"
    if beside is not None and beside.doing:
        doing = f"{beside.doing}: no sign of life for {silent_s:.0f} s"
    before = f"; at its last beat it was at {beside.place}" if beside is not None and beside.place else ""
    return doing + before
