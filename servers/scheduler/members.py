"""Who is in the job. Pure: the clock is passed in.

A member joins, is ready when all have joined and ranks are given, and then leaves in order or is lost. Every
transition is in ``NEXT``; one that is not there is a mistake of the sender and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from kvstore.errors import UsageError
from kvstore.wire import Message, Node


class State(Enum):
    """Where a member is in its life."""

    JOINED = auto()
    READY = auto()
    LEFT = auto()
    LOST = auto()


class Event(Enum):
    """What can happen to it."""

    ALL_HERE = auto()
    LEAVES = auto()
    DIES = auto()


NEXT = {
    (State.JOINED, Event.ALL_HERE): State.READY,
    (State.JOINED, Event.LEAVES): State.LEFT,
    (State.JOINED, Event.DIES): State.LOST,
    (State.READY, Event.LEAVES): State.LEFT,
    (State.READY, Event.DIES): State.LOST,
}


@dataclass
class Member:
    """A process of the job.

    Attributes:
        nonce: the random number it joined with, by which a repeated request to join is known.
        hint: the rank it asked for, -1 for any.
        join_peer, join_seq: the link and number of its request to join.
        peer: the link of its heartbeat, over which notices go; None before the first beat.
        heard, left: when it was last heard of, and when it left.
        notices: what it will be told as soon as there is a link to tell it over.
    """

    role: str
    nonce: int
    hint: int
    address: str
    join_peer: bytes
    join_seq: int
    rank: int = -1
    incarnation: int = 0
    state: State = State.JOINED
    peer: bytes | None = None
    heard: float = 0.0
    left: float = 0.0
    notices: list[Message] = field(default_factory=list)

    @property
    def node(self) -> Node:
        """Who it is."""
        return Node(self.role, self.rank, self.incarnation)

    def happens(self, event: Event) -> bool:
        """Make the transition; False if there is none."""
        after = NEXT.get((self.state, event))
        if after is None:
            return False
        self.state = after
        return True


class Members:
    """The members of one job.

    Args:
        num_workers, num_servers: how many there will be.
        limit_s: the silence after which a member is lost.
    """

    def __init__(self, num_workers: int, num_servers: int, limit_s: float) -> None:
        self.wanted = {"worker": num_workers, "server": num_servers}
        self.limit_s = limit_s
        self.everyone: list[Member] = []
        self.complete = False

    def of(self, role: str) -> list[Member]:
        """The members of ``role``, in the order of their ranks once these are given."""
        return sorted((m for m in self.everyone if m.role == role), key=lambda m: m.rank)

    def find(self, role: str, rank: int) -> Member | None:
        """The member of ``role`` with ``rank``, or that asked for it while ranks are not given."""
        for member in self.everyone:
            if member.role == role and (member.rank if self.complete else member.hint) == rank:
                return member
        return None

    def by_nonce(self, nonce: int) -> Member | None:
        """The member that joined with ``nonce``."""
        return next((m for m in self.everyone if m.nonce == nonce), None)

    def join(self, member: Member) -> None:
        """Let ``member`` in.

        Raises:
            UsageError: the job is full.
        """
        wanted = self.wanted.get(member.role)
        if wanted is None:
            raise UsageError(f"a {member.role} does not join a job")
        if len(self.of(member.role)) >= wanted:
            raise UsageError(f"the job has its {wanted} {member.role}s already")
        self.everyone.append(member)

    def withdraw(self, member: Member) -> None:
        """Let somebody else have the place of ``member``, which does not wait for the others any more."""
        self.everyone.remove(member)

    def settle(self, now: float) -> bool:
        """Give ranks if all are here now: those asked for, then in the order of coming. Return whether it did."""
        if self.complete or len(self.everyone) < sum(self.wanted.values()):
            return False
        for role, wanted in self.wanted.items():
            free = list(range(wanted))
            members = [m for m in self.everyone if m.role == role]
            for member in members:
                if member.hint in free:
                    member.rank = member.hint
                    free.remove(member.hint)
            for member in members:
                if member.rank < 0:
                    member.rank = free.pop(0)
        for member in self.everyone:
            member.incarnation = 1
            member.heard = now
            member.happens(Event.ALL_HERE)
        self.complete = True
        return True

    def overdue(self, now: float) -> list[Member]:
        """The ready members that have been silent for too long."""
        return [m for m in self.everyone if m.state is State.READY and now - m.heard > self.limit_s]

    def forgive(self, now: float) -> None:
        """Count everybody's silence from ``now`` on."""
        for member in self.everyone:
            member.heard = now

    def all_gone(self, role: str) -> bool:
        """Whether every member of ``role`` has joined, and left or been lost."""
        members = self.of(role)
        return len(members) == self.wanted[role] and all(m.state in (State.LEFT, State.LOST) for m in members)

    def absent(self) -> str:
        """Say who has not joined yet: by name where the names are known."""
        words = []
        for role, wanted in self.wanted.items():
            here = self.of(role)
            if len(here) == wanted:
                continue
            hints = {m.hint for m in here}
            if all(0 <= hint < wanted for hint in hints):
                words.append(", ".join(f"{role} {rank}" for rank in range(wanted) if rank not in hints))
            else:
                words.append(f"{wanted - len(here)} of {wanted} {role}s")
        return " and ".join(words)
