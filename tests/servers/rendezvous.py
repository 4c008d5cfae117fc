"""A scheduler without any transport: its members, what they say, and a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from asking import Door, sent

from kvstore import wire
from servers.scheduler import Scheduler
from servers.scheduler.logged import FormerLinks, LoggedScheduler, Record

LIMIT = 10.0


class Member:
    """One process: joins with a nonce, then asks by its rank."""

    def __init__(self, role: str, nonce: int, hint: int = -1) -> None:
        self.role, self.rank, self.incarnation, self.hint = role, hint, nonce, hint
        self.peer = b"link of %s %d" % (role.encode(), nonce)
        self.beats = b"heartbeat of %s %d" % (role.encode(), nonce)
        self.nonce, self.seq = nonce, 0
        self.aggregator = -1
        self.start = 1

    @property
    def node(self) -> wire.Node:
        return wire.Node(self.role, self.rank, self.incarnation)

    def me(self) -> wire.Sender:
        self.seq += 1
        return wire.Sender(self.node, self.seq, 0)

    def join(self) -> wire.Join:
        me = wire.Sender(wire.Node(self.role, self.hint, self.nonce), 1, 0)
        return wire.Join(
            me,
            address=f"at {self.nonce}",
            aggregator=self.aggregator,
            start=self.start,
            host=f"node{self.nonce}",
            pid=self.nonce,
        )

    def again(self) -> Member:
        other = Member(self.role, self.nonce + 1000, self.hint)
        other.start = self.start + 1
        return other

    def barrier(self, number: int = 1, store: int = 0) -> wire.Barrier:
        return wire.Barrier(self.me(), store=store, number=number)

    def declare(self, *keys: str, shape: Iterable[int] = (1,), store: int = 0) -> wire.Declare:
        return wire.Declare(
            self.me(),
            store=store,
            keys=list(keys),
            kinds=[0] * len(keys),
            shapes=[list(shape)],
            dtypes=["int8"],
            bound=1000,
            longest=2**40,
        )

    def pause(self, number: int = 1, store: int = 0) -> wire.Pause:
        return wire.Pause(self.me(), store, number, 0, [], [])

    def leave(self, error: str | None = None) -> wire.Leave:
        return wire.Leave(self.me(), error=error)

    def explain(self, about: int) -> wire.Explain:
        return wire.Explain(self.me(), about=about)


class Job:
    """A scheduler, its members, and the time.

    Args:
        aggregated: the ranks of the workers of each aggregator.
        replicas: how many standbys each server has.
        door: knows which key each link has proved.
        min_workers: the job goes on without workers that die as long as so many are left; 0 if it does not.
    """

    def __init__(
        self,
        workers: int = 2,
        servers: int = 1,
        farewell_s: float = 0.0,
        *,
        aggregated: Sequence[Sequence[int]] = (),
        replicas: int = 0,
        start: bool = True,
        door: Door | None = None,
        min_workers: int = 0,
        patience_s: float = 0.0,
        max_workers: int = 0,
    ) -> None:
        self.scheduler = Scheduler(
            *(workers, servers, LIMIT, farewell_s, door),
            num_aggregators=len(aggregated),
            replicas=replicas,
            min_workers=min_workers,
            patience_s=patience_s,
            max_workers=max_workers,
        )
        self.now = 1000.0
        self.workers = [Member("worker", 100 + n, n) for n in range(workers)]
        self.servers = [Member("server", 20 + n, n) for n in range(servers)]
        self.standbys = [Member("standby", 30 + n, n) for n in range(servers * replicas)]
        self.aggregators = [Member("aggregator", 50 + n, n) for n in range(len(aggregated))]
        for aggregator, ranks in enumerate(aggregated):
            for rank in ranks:
                self.workers[rank].aggregator = aggregator
        self.gone: list[Member] = []  # whose places others have taken
        self.tick()
        if start:
            self.start()

    def start(self) -> None:
        for member in self.everyone:
            self.say(member, member.join())
        for member in self.everyone:
            member.incarnation = 1
            assert self.beat(member)[0] == wire.Alive()

    def and_workers(self) -> tuple[Any, ...]:
        """Itself and its workers, for a test to name."""
        return self, *self.workers

    def and_members(self) -> tuple[Any, ...]:
        return self, *self.everyone

    @property
    def everyone(self) -> list[Member]:
        return self.workers + self.servers + self.standbys + self.aggregators

    def handle(self, peer: bytes, message: wire.Message) -> list[tuple[Any, Any]]:
        """What was sent, as (member, message): which link is whose, the test need not say."""
        return self.named(self.scheduler.handle(peer, sent(message), self.now))

    def say(self, member: Member, message: wire.Message) -> list[tuple[Any, Any]]:
        return self.handle(member.peer, message)

    def reply(self, member: Member, message: Any) -> Any:
        """The only message that comes back, to whoever asked."""
        ((whom, reply),) = self.say(member, message)
        assert (whom, reply.seq) == (member, message.seq)
        return reply

    def beat(self, member: Member) -> list[wire.Message]:
        outbox = self.handle(member.beats, wire.Beat(member.node))
        assert all(whom is member for whom, _ in outbox)
        return [message for _, message in outbox]

    def tick(self, seconds: float = 0.0) -> list[tuple[Any, Any]]:
        outbox: list[tuple[bytes, wire.Message]] = []
        end = self.now + seconds
        while not outbox and self.now < end:
            self.now = min(end, self.now + LIMIT / 4)
            outbox = self.scheduler.tick(self.now)
        return self.named(outbox or self.scheduler.tick(self.now))

    def named(self, outbox: list[tuple[bytes, wire.Message]]) -> list[tuple[Any, Any]]:
        everyone = self.everyone + self.gone
        links = {m.peer: m for m in everyone} | {m.beats: m for m in everyone}
        return [(links.get(peer, peer), sent(message)) for peer, message in outbox]


class Sparing(Job):
    """A job that goes on without workers that die as long as ``least`` are left."""

    def __init__(self, workers: int = 3, servers: int = 1, least: int = 1, farewell_s: float = 0.0, **how: Any) -> None:
        super().__init__(workers, servers, farewell_s, min_workers=least, **how)

    def lose(self, rank: int, how: str = "was killed by SIGKILL", final: bool = False) -> list[tuple[Any, Any]]:
        return self.handle(b"launcher", wire.Lost("worker", rank, how, final=final))


def logged(
    records: list[Record], farewell_s: float = 0.0, least: int = 0, door: Door | None = None
) -> tuple[LoggedScheduler, Scheduler]:
    """A scheduler of three workers and a server that logs into a list."""
    links = FormerLinks(door or Door())
    scheduler = Scheduler(3, 1, LIMIT, farewell_s, links, min_workers=least)
    return LoggedScheduler(scheduler, links, records.append), scheduler


def joined(scheduler: LoggedScheduler) -> tuple[list[Member], Member]:
    """Three workers and a server that have come to it."""
    workers, server = [Member("worker", 100 + n, n) for n in range(3)], Member("server", 20, 0)
    for member in (*workers, server):
        scheduler.handle(member.peer, sent(member.join()), 1.0)
    for member in (*workers, server):
        member.incarnation = member.seq = 1
        scheduler.handle(member.beats, sent(wire.Beat(member.node)), 1.0)
    return workers, server
