"""The members of a job. Pure: the time is passed in.

They join, get ranks when all have joined, and leave or are lost. ``NEXT`` has every transition; another one is a
mistake of the sender and changes nothing. The cost of a message or a tick does not depend on
the number of members.

In a job with replicas each server's rank has two seats, ("server", rank) and ("standby", rank). When the process in a
seat has been lost, the same member's next start takes the seat.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TypeVar

from kvstore import wire
from kvstore.errors import UsageError
from servers.names import name

T = TypeVar("T")

SEATS = ("server", "standby")  # the roles that are started again in a job with replicas


class MemberState(Enum):
    """What a member is: it has asked to join, all are here, it has left, or it is lost."""

    JOINED = auto()
    READY = auto()
    LEFT = auto()
    LOST = auto()


class MemberEvent(Enum):
    """What changes the state of a member."""

    ALL_HERE = auto()
    LEAVES = auto()
    DIES = auto()
    FAILS = auto()


# Every legal transition. What is not here changes nothing, so a message that comes late cannot revive a member: a
# second ``Leave``, a report of a loss behind a departure, the silence of a member that has left. LEFT has one
# successor: a worker that has left because of an exception of its own ends with a code that says so. LOST has none:
# when the process of a seat is started again, it is another ``JobMember`` in the same seat.
#
#     state     its heartbeat     its silence     counts as present
#     JOINED    comes later       means nothing   yes
#     READY     is answered       loses it        yes
#     LEFT      is answered       means nothing   no
#     LOST      is told to end    means nothing   no
NEXT = {
    (MemberState.JOINED, MemberEvent.ALL_HERE): MemberState.READY,
    (MemberState.JOINED, MemberEvent.LEAVES): MemberState.LEFT,
    (MemberState.JOINED, MemberEvent.DIES): MemberState.LOST,
    (MemberState.READY, MemberEvent.LEAVES): MemberState.LEFT,
    (MemberState.READY, MemberEvent.DIES): MemberState.LOST,
    (MemberState.LEFT, MemberEvent.FAILS): MemberState.LOST,
}


@dataclass
class JobMember:
    """A process of the job. Links are named as the transport names them; times are of the scheduler's clock."""

    role: str
    nonce: int  # a random number, which identifies a repeated request to join
    hint: int  # the rank that it asked for, -1 for any
    address: str  # where other members reach it; empty for workers
    join_peer: bytes
    join_seq: int
    key: str = ""  # the public key that the link of its request to join has proved; empty where links prove no keys
    aggregator: int = -1  # of a worker: the rank of the aggregator that speaks for it
    start: int = 1  # how often its process has been started
    host: str = ""
    pid: int = 0
    rank: int = -1
    incarnation: int = 0
    state: MemberState = MemberState.JOINED
    peer: bytes | None = None  # the link of its heartbeat, which takes notices; None before the first heartbeat
    heard: float = 0.0  # the time of its last sign of life: of the later of the next two
    beaten: float = 0.0
    pulsed: float = 0.0  # of the process beside it
    pulse_peer: bytes | None = None
    stopped: wire.Stacks | None = None  # what the process beside it says while this one is stopped
    retired: bool = False  # it has been told to end, because the other process of its rank serves alone
    epoch: int = 0  # of the latest ``Roster`` that was sent over ``peer``
    viewed: int = 0  # likewise of its ``View``; of a worker or an aggregator: how many takeovers were announced to it
    notices: list[wire.Message] = field(default_factory=list)  # to be sent as soon as there is a link

    @property
    def node(self) -> wire.Node:
        return wire.Node(self.role, self.rank, self.incarnation)


class Members:
    """The members of one job.

    Args:
        limit_s: after how many seconds of silence a member is lost.
        news: is told, line by line, what happens to members.
        spares_workers: whether the job goes on without workers that are lost, which may be started again.
        max_workers: so many there may be with those that are added once all have joined.

    Attributes:
        wanted: how many members of each role the job has, with those that were added.
        complete: whether all have joined, and have ranks.
        present: how many have joined and have neither left nor been lost.
        lost: how many have been lost, and have not been started again.
    """

    def __init__(
        self,
        num_workers: int,
        num_servers: int,
        limit_s: float,
        num_aggregators: int = 0,
        replicas: int = 0,
        news: Callable[[str], object] = str,
        spares_workers: bool = False,
        max_workers: int = 0,
    ) -> None:
        self.spares_workers = spares_workers
        self._added = range(num_workers, max_workers)  # the ranks of workers that may be added
        self.wanted = {
            "worker": num_workers,
            "server": num_servers,
            "standby": num_servers * replicas,
            "aggregator": num_aggregators,
        }
        self.limit_s = limit_s
        self.complete = False
        self.present = self.lost = 0
        self._by_nonce: dict[int, JobMember] = {}  # in the order of joining
        self._by_wish: dict[tuple[str, int], dict[int, JobMember]] = {}  # by role and hint, then by nonce
        self._by_rank: dict[tuple[str, int], JobMember] = {}
        self._keys: set[str] = set()  # with which members have joined
        self._ended: dict[tuple[str, int], int] = {}  # by seat: the latest start that has ended
        self._ready: OrderedDict[int, JobMember] = OrderedDict()  # by nonce, the longest silent first
        self._joined = Counter[str]()  # by role: how many have joined
        self._gone = Counter[str]()  # and how many of them have left or been lost
        self._news = news
        self._absent: str | None = None  # what ``absent`` says; None if that has to be worked out

    def __len__(self) -> int:
        return len(self._by_nonce)

    @property
    def everyone(self) -> list[JobMember]:
        return list(self._by_nonce.values())

    def restarts(self, role: str) -> bool:
        """Whether members of ``role`` are started again when they are lost."""
        return role in SEATS and self.wanted["standby"] > 0

    def starts_again(self, role: str) -> bool:
        """Whether a later start of a member of ``role`` takes the seat of one that is lost."""
        return self.restarts(role) or (role == "worker" and self.spares_workers)

    def all_gone(self, role: str) -> bool:
        return self._gone[role] == self.wanted[role]

    # ---- finding members

    def of(self, role: str) -> list[JobMember]:
        """Return the members of ``role``, in the order of their ranks; none before they have ranks."""
        if not self.complete:
            return []
        ranks = range(self.wanted[role] if role != "worker" else max(self.wanted[role], self._added.stop))
        return [self._by_rank[role, rank] for rank in ranks if (role, rank) in self._by_rank]

    def find(self, role: str, rank: int) -> JobMember | None:
        """Return the member of ``role`` with ``rank``; before members have ranks, the first that asked for it."""
        if self.complete:
            return self._by_rank.get((role, rank))
        return next(iter(self._by_wish.get((role, rank), {}).values()), None)

    def identify(self, node: wire.Node) -> JobMember | None:
        """Return the member that ``node`` names; None before members have ranks."""
        member = self._by_rank.get((node.role, node.rank))
        return member if member is not None and member.incarnation == node.incarnation else None

    def by_nonce(self, nonce: int) -> JobMember | None:
        return self._by_nonce.get(nonce)

    def has_joined(self, key: str) -> bool:
        return key in self._keys

    # ---- joining

    def join(self, member: JobMember, now: float = 0.0) -> JobMember | None:
        """Let ``member`` in. Return the lost one whose seat it takes; None if it takes none."""
        wanted = self.wanted.get(member.role)
        if wanted is None:
            raise UsageError(f"workers, servers and aggregators join a job, a {member.role} does not")
        if member.role == "standby" and not wanted:
            raise UsageError(
                "this job has no standbys: KVSTORE_REPLICAS is 0 at the scheduler; set it alike everywhere"
            )
        before = self._predecessor(member)
        is_added = before is None and self._is_added(member)
        if before is None and not is_added and self._joined[member.role] >= wanted:
            raise UsageError(f"the job has its {wanted} {member.role}s already")
        if member.aggregator >= self.wanted["aggregator"]:
            raise UsageError(
                f"{member.role} {member.hint} names aggregator {member.aggregator} as its own (KVSTORE_AGGREGATOR), "
                f"and the scheduler expects {self.wanted['aggregator']} of them (KVSTORE_NUM_AGGREGATORS): set both "
                "alike in all processes of the job, as launch.py does"
            )
        if before is not None:
            self._replace(before, member, now)
            return before
        if member.key in self._keys:
            raise UsageError("a member has joined with this public key already; give each process of the job its own")
        if member.key:
            self._keys.add(member.key)
        self._by_nonce[member.nonce] = member
        self._by_wish.setdefault((member.role, member.hint), {})[member.nonce] = member
        self._joined[member.role] += 1
        self.present += 1
        self._absent = None
        if is_added:
            self.wanted[member.role] += 1
            self._seat(member, member.hint, 1 + member.start, now)
            self._news(f"{member.node} has been added")
        return None

    def _is_added(self, member: JobMember) -> bool:
        """Whether ``member`` is a worker that was added: it takes a rank that nobody has had."""
        free = member.hint in self._added and (member.role, member.hint) not in self._by_rank
        return member.role == "worker" and self.complete and free

    def _predecessor(self, member: JobMember) -> JobMember | None:
        """Return the member lost from the seat that ``member`` takes; None if it takes none."""
        seat = member.role, member.hint
        if not self.starts_again(member.role):
            return None
        if member.start <= self._ended.get(seat, 0):
            raise UsageError(
                f"start {member.start} of {member.role} {member.hint} (KVSTORE_START) is known to have ended"
            )
        before = self._by_rank.get(seat)
        if before is None or before.state is MemberState.READY or member.start <= before.start:
            return None
        if member.role == "worker" and before.state is not MemberState.LOST:
            return None  # it has left in order
        if member.key != before.key:
            raise UsageError(f"{before.node} has joined with another key; start it again with the same")
        return before

    def _replace(self, before: JobMember, member: JobMember, now: float) -> None:
        del self._by_nonce[before.nonce]
        self._by_nonce[member.nonce] = member
        self._seat(member, before.rank, before.incarnation + member.start - before.start, now)
        self._gone[member.role] -= 1
        self.present += 1
        self.lost -= before.state is MemberState.LOST
        self._news(f"{member.node} has been started again")

    def _seat(self, member: JobMember, rank: int, incarnation: int, now: float) -> None:
        """Give a rank to a process that has come while the job runs. The first incarnations are those of the start."""
        self._by_rank[member.role, rank] = member
        member.rank, member.incarnation, member.heard = rank, incarnation, now
        member.state = MemberState.READY
        self._ready[member.nonce] = member

    def end(self, role: str, rank: int, start: int) -> JobMember | None:
        """End ``start`` of a member that may be started again; 0 is the start that has joined.

        Return the member that is lost by that; None if it is none. Before all have joined, it is withdrawn.
        """
        member = self.find(role, rank)
        ended = start or (member.start if member is not None else 0)
        self._ended[role, rank] = max(ended, self._ended.get((role, rank), 0))
        if member is None or member.start > ended:
            return None
        if member.state is MemberState.JOINED:
            self.withdraw(member)
            return member
        return member if self.happens(member, MemberEvent.DIES) else None

    def withdraw(self, member: JobMember) -> None:
        """Remove ``member``, which has given up joining, so that another process can take its place."""
        del self._by_nonce[member.nonce]
        del self._by_wish[member.role, member.hint][member.nonce]
        self._keys.discard(member.key)
        self._joined[member.role] -= 1
        self.present -= 1
        self._absent = None

    def settle(self, now: float) -> bool:
        """Give ranks if all have joined: those asked for, then in the order of joining. Return whether it did."""
        if self.complete or len(self._by_nonce) < sum(self.wanted.values()):
            return False
        self._rank()
        self.complete = True
        self._news(f"all {len(self._by_nonce)} members have joined")
        for member in self._by_nonce.values():
            member.incarnation = member.start if self.restarts(member.role) else 1  # of a worker, its first one here
            member.heard = now
            self.happens(member, MemberEvent.ALL_HERE)
        return True

    def _rank(self) -> None:
        for member in self._by_nonce.values():
            if 0 <= member.hint < self.wanted[member.role]:
                self._by_rank.setdefault((member.role, member.hint), member)
        for (_, rank), member in self._by_rank.items():
            member.rank = rank
        for role, wanted in self.wanted.items():
            free = (rank for rank in range(wanted) if (role, rank) not in self._by_rank)
            for member in self._by_nonce.values():
                if member.role == role and member.rank < 0:
                    member.rank = next(free)
                    self._by_rank[role, member.rank] = member

    def absent(self) -> str:
        """Name the members that have not joined yet: by rank if the missing ranks are known, else by number."""
        if self._absent is None:
            self._absent = " and ".join(filter(None, (self._absent_of(role) for role in self.wanted)))
        return self._absent

    def _absent_of(self, role: str) -> str:
        wanted = self.wanted[role]
        hints = [member.hint for member in self._by_nonce.values() if member.role == role]
        if len(hints) == wanted:
            return ""
        missing = set(range(wanted)).difference(hints)
        if len(missing) == wanted - len(hints):
            return name(role, missing)
        return f"{wanted - len(hints)} of {wanted} {role}s"

    # ---- what happens to them

    def happens(self, member: JobMember, event: MemberEvent) -> bool:
        """Make the transition of ``member``; return False if there is none."""
        after = NEXT.get((member.state, event))
        if after is None:
            return False
        member.state = after
        if after is MemberState.READY:
            self._ready[member.nonce] = member
            return True
        self._ready.pop(member.nonce, None)
        if event is not MemberEvent.FAILS:
            self._gone[member.role] += 1
            self.present -= 1
        self.lost += after is MemberState.LOST
        if self.complete:  # else it has no rank
            self._news(f"{member.node} {'is lost' if after is MemberState.LOST else 'has left'}")
        return True

    def hear(self, member: JobMember, now: float) -> None:
        """Note a sign of life. ``now`` must not decrease from call to call."""
        member.heard = now
        if member.nonce in self._ready:
            self._ready.move_to_end(member.nonce)

    def overdue(self, now: float) -> list[JobMember]:
        return list(itertools.takewhile(lambda member: now - member.heard > self.limit_s, self._ready.values()))

    def forgive(self, now: float) -> None:
        for member in self._ready.values():
            member.heard = now

    def recall(self, node: wire.Node, heard: float) -> None:
        """Let the silence of the member that ``node`` names have begun at ``heard``, before everybody else's."""
        member = self.identify(node)
        if member is not None and member.nonce in self._ready:
            member.heard = heard
            self._ready.move_to_end(member.nonce, last=False)


# ---- what members are told of each other


class Welcomes:
    """What welcomes say once all have joined: addresses, public keys, and the workers of each aggregator."""

    def __init__(self, members: Members) -> None:
        self._num_workers = members.wanted["worker"]
        self.servers = [member.address for member in members.of("server")]
        self._aggregators = [member.address for member in members.of("aggregator")]
        self._keys: dict[str, list[str]] = {}  # by role and rank; empty where links prove none
        for role in ("worker", "aggregator"):
            keys = [member.key for member in members.of(role)]
            self._keys[role] = keys if any(keys) else []
        self._aggregated: list[list[int]] = [[] for _ in self._aggregators]
        for worker in members.of("worker"):
            if worker.aggregator >= 0:
                self._aggregated[worker.aggregator].append(worker.rank)

    def of(self, member: JobMember) -> wire.Welcome:
        welcome = wire.Welcome(
            member.join_seq,
            rank=member.rank,
            incarnation=member.incarnation,
            num_workers=self._num_workers,
            servers=list(self.servers),
        )
        if member.role == "worker":
            own = member.aggregator
            return replace(welcome, aggregator=self._aggregators[own]) if own >= 0 else welcome
        if member.role == "aggregator":  # hundreds of them need not hear of thousands of workers
            own_workers = self._aggregated[member.rank]
            return replace(
                welcome,
                worker_keys=_only(own_workers, self._keys["worker"], ""),
                aggregated=_only([member.rank], self._aggregated, []),
            )
        return replace(
            welcome,
            worker_keys=self._keys["worker"],
            aggregated=self._aggregated,
            aggregator_keys=self._keys["aggregator"],
        )


def _only(places: Sequence[int], items: Sequence[T], other: T) -> list[T]:
    """Return ``items`` with ``other`` in all but ``places``; nothing if there are none."""
    shown = [other] * len(items)
    for place in places if items else ():
        shown[place] = items[place]
    return shown
