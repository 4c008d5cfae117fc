"""A member of a job as the scheduler knows it, and its states.

A member joins, is ready when all have joined and have ranks, and then leaves in order or is lost. ``NEXT`` has every
transition; another one is a mistake of the sender and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from kvstore import wire


class MemberState(Enum):
    """The state of a member."""

    JOINED = auto()
    READY = auto()
    LEFT = auto()
    LOST = auto()


class MemberEvent(Enum):
    """What changes the state of a member."""

    ALL_HERE = auto()
    LEAVES = auto()
    DIES = auto()


NEXT = {
    (MemberState.JOINED, MemberEvent.ALL_HERE): MemberState.READY,
    (MemberState.JOINED, MemberEvent.LEAVES): MemberState.LEFT,
    (MemberState.JOINED, MemberEvent.DIES): MemberState.LOST,
    (MemberState.READY, MemberEvent.LEAVES): MemberState.LEFT,
    (MemberState.READY, MemberEvent.DIES): MemberState.LOST,
}


@dataclass
class JobMember:
    """A process of the job.

    Attributes:
        nonce: the random number that it joined with, which identifies a repeated request to join.
        hint: the rank that it asked for, -1 for any.
        address: where other members reach it; empty for workers.
        aggregator: of a worker, the rank of the aggregator that speaks for it; -1 for none.
        start: how often the member's process has been started.
        host, pid: where the process runs.
        join_peer, join_seq: the link and number of its request to join.
        key: the public key that its link proved then; empty where links prove no keys.
        peer: the link of its heartbeat, which takes notices; None before the first beat.
        heard: the time of its last sign of life.
        beaten, pulsed: the times of its heartbeat's last sign of life, and of that of the process beside it.
        pulse_peer: the link of the process beside it; None before its first sign of life.
        stopped: what that process says of this one while it is stopped; None while it is not.
        epoch: of the latest ``Roster`` that it has been sent over ``peer``.
        viewed: of the latest ``View`` that it has been sent over ``peer``, the epoch; of a worker or an aggregator, how
            many changes of servers it has been told of.
        notices: to be sent as soon as there is a link.
    """

    role: str
    nonce: int
    hint: int
    address: str
    join_peer: bytes
    join_seq: int
    key: str = ""
    aggregator: int = -1
    start: int = 1
    host: str = ""
    pid: int = 0
    rank: int = -1
    incarnation: int = 0
    state: MemberState = MemberState.JOINED
    peer: bytes | None = None
    heard: float = 0.0
    beaten: float = 0.0
    pulsed: float = 0.0
    pulse_peer: bytes | None = None
    stopped: wire.Stacks | None = None
    epoch: int = 0
    viewed: int = 0
    notices: list[wire.Message] = field(default_factory=list)

    @property
    def node(self) -> wire.Node:
        """Its role, rank and incarnation."""
        return wire.Node(self.role, self.rank, self.incarnation)
