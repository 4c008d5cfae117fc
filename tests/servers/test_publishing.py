"""Versions and followers without sockets: real shards with standbys, links that deliver in any order, real followers.

Two workers push to an array that is cut over servers, and worker 0 publishes. Whatever is delivered when, and whoever
takes over: a follower never has pieces of two versions, and has the bytes that were published.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from asking import Worker, sender, sent
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import copied

from kvstore import wire
from kvstore.codecs.changes import apply_changes
from kvstore.reading.held import ReadSegment
from kvstore.reading.published_copy import CopyMemory, Published, PublishedCopy, VersionAsk
from kvstore.transport.memory import Heap
from kvstore.wire import versions
from servers.reading import desk
from servers.reading.desk import PublishedRead
from servers.shard import Shard

SIZE = 40  # elements of a segment; there is one on each server
PIECE = 16


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "PIECE", PIECE)


class Server:
    """A shard with a standby that has applied each record, and links over which requests have not come yet."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.links: list[deque[Any]] = [deque(), deque()]
        self.unanswered: list[dict[int, Any]] = [{}, {}]  # what has come, by number
        self.shares = False
        self.records: deque[wire.Message] = deque()
        self.standby: Shard | None = Shard(rank, 2)
        self.serve(Shard(rank, 2))

    def serve(self, shard: Shard) -> None:
        self.shard = shard
        shard.record(self)

    def note(self, message: wire.Message) -> None:
        self.records.append(sent(message))

    def deliver(self, link: int) -> None:
        if self.links[link]:
            message = self.links[link].popleft()
            self.unanswered[link][message.seq] = message
            for peer, answer in self.shard.handle(b"link %d" % link, sent(message)):
                assert not isinstance(answer, wire.Failure)
                del self.unanswered[int(peer.split()[1])][answer.seq]
        while self.records:
            record = self.records.popleft()
            if self.standby is not None:
                self.standby.apply(record)

    def crash(self, part: float) -> None:
        """Die over a request, when the standby has stored a part of its records, and nobody has an answer."""
        link = max((0, 1), key=lambda link: len(self.links[link]))
        if self.standby is not None and self.links[link]:
            message = self.links[link].popleft()
            self.unanswered[link][message.seq] = message
            self.shard.handle(b"link %d" % link, sent(message))
            for record in list(self.records)[: int(part * len(self.records))]:
                self.standby.apply(record)
            self.records.clear()
            self.take_over(crashed=True)

    @property
    def newest(self) -> int:
        return self.shard.stores[0].publishing.newest

    def take_over(self, crashed: bool = False) -> None:
        if self.standby is not None:
            newest = self.newest
            self.serve(self.standby)
            self.standby = None
            assert self.newest >= newest or crashed
            for link, unanswered in zip(self.links, self.unanswered, strict=True):  # workers resend
                link.extendleft(reversed(unanswered.values()))
                unanswered.clear()
        else:
            self.standby = copied(self.shard, 2)


class Job:
    """Servers, two workers, and what has been published: ``published`` by the number of the version.

    Where workers are not in step, what a server has of a version is known once it has it: ``made`` has its bits.
    """

    def __init__(self, servers: int, mode: str = "sync", optimizer: str = "sgd", **rule: Any) -> None:
        self.in_step = mode == "sync" and not rule
        self.made: dict[tuple[int, int], list[int]] = {}
        self.servers = [Server(rank) for rank in range(servers)]
        self.workers = [Worker(0), Worker(1)]
        self.clocks = [0, 0]
        self.number = 0
        self.published: dict[int, int] = {}
        torch.manual_seed(1)
        self.values = [torch.randn(SIZE * servers)]  # after each round
        for server in self.servers:
            for worker in self.workers:
                self.tell(server, worker, worker.open(mode, **rule))
            first = self.part(server, self.values[0])
            self.tell(server, self.workers[0], self.workers[0].init({server.rank: first}, keys=["w"]))
            self.tell(server, self.workers[0], self.workers[0].set_optimizer(optimizer, lr=0.5))
            for link in (0, 1, 0, 0):
                server.deliver(link)

    @staticmethod
    def part(server: Server, values: torch.Tensor) -> torch.Tensor:
        return values[server.rank * SIZE : (server.rank + 1) * SIZE].clone()

    @staticmethod
    def tell(server: Server, worker: Worker, message: wire.Message) -> None:
        server.links[worker.rank].append(message)

    def push(self, rank: int) -> None:
        """Push a gradient that changes some elements, and so little that roundings to bfloat16 change, or do not."""
        if self.clocks[rank] > min(self.clocks) + 2:
            return
        self.clocks[rank] += 1
        clock = self.clocks[rank]
        gradient = torch.zeros(SIZE * len(self.servers))
        chosen = random.Random(clock).sample(range(len(gradient)), 9)
        gradient[chosen] = 1e-2
        if len(self.values) <= clock:
            self.values.append(self.values[-1] - 0.5 * (gradient + gradient))
        for server in self.servers:
            self.tell(
                server, self.workers[rank], self.workers[rank].push({server.rank: self.part(server, gradient)}, clock)
            )

    def publish(self) -> None:
        self.number += 1
        self.published[self.number] = self.clocks[0]
        for server in self.servers:
            fields = {"store": 0, "lineage": 5, "number": self.number, "label": f"v{self.number}"}
            message = wire.Publish(
                self.workers[0].me(), **fields, rounded="bfloat16", ids=[server.rank], clocks=[self.clocks[0]]
            )
            self.tell(server, self.workers[0], message)

    def bits_of(self, server: Server, number: int, found: list[int]) -> list[int]:
        """Return what a server must have of a version; ``found`` is what it has."""
        if self.in_step:
            values = self.part(server, self.values[self.published[number]].to(torch.bfloat16))
            return values.view(torch.int16).numpy().view("u2").tolist()
        return self.made.setdefault((server.rank, number), found)

    def check(self, server: Server) -> None:
        """Whatever a server, or its standby, says that it has of a version is what was published."""
        for shard in (server.shard, server.standby):
            if shard is None or not shard.stores:
                continue
            publishing = shard.stores[0].publishing
            for number in publishing.whole:
                pieces = publishing.pieces_of([server.rank])
                changes = [publishing.changes(piece, 0, number) for piece in pieces]
                has = np.zeros(SIZE, "u2")
                for place, found in enumerate(changes):
                    if found is not None:
                        apply_changes(found[1], has[place * PIECE : (place + 1) * PIECE])
                if None not in changes:
                    assert has.tolist() == self.bits_of(server, number, has.tolist())

    def settle(self) -> None:
        while self.clocks[0] != self.clocks[1]:
            self.push(min((0, 1), key=self.clocks.__getitem__))
        for server in self.servers:
            for link in (0, 1):
                while server.links[link]:
                    server.deliver(link)
                    if not self.in_step:
                        self.check(server)


class Reader:
    """A follower whose questions and answers are under way for as long as a test likes; it may share another's copy."""

    def __init__(self, job: Job, other: Reader | None = None) -> None:
        self.job = job
        segments = [ReadSegment(at, at, at * SIZE, (at + 1) * SIZE) for at in range(len(job.servers))]
        arrays = {"w": Published(SIZE * len(segments), "bfloat16", segments)}
        self.memory = CopyMemory(arrays) if other is None else other.memory
        self.fetches: list[Reader] = [] if other is None else other.fetches  # the one of those who share it
        self.copy = PublishedCopy(arrays, self.memory)
        self.out = torch.zeros(SIZE * len(segments), dtype=torch.bfloat16)
        self.version = 0
        self.node = sender(0 if other is None else 1, role="reader").node
        self.newest: wire.VersionRead | None = None
        self.asked: list[tuple[VersionAsk | None, Any]] = []  # None: which version there is

    def ask(self) -> None:
        if self.asked or self.fetches not in ([], [self]):
            return
        if self.newest is None:
            self.asked.append((None, {"ids": [], "held": [], "lineage": self.memory.lineage, "want": 0}))
        elif self.copy.has(self.newest.lineage, self.newest.number):
            self.write()
        else:
            self.fetches[:] = [self]
            self.copy.note(self.newest.lineage, self.newest.number, self.newest.label)
            self.asked += [(ask, self.copy.fields(ask)) for ask in self.copy.asks()]
            for server in self.job.servers:
                publishing = server.shard.stores[0].publishing
                if publishing.lineage == self.memory.lineage:
                    publishing.fetches(self.node, self.memory.number)

    def hear(self, which: int) -> None:
        """Hear one server's answer, of this moment, to what was asked some time ago."""
        if not self.asked:
            return
        ask, fields = self.asked.pop(which % len(self.asked))
        request = sent(wire.ReadVersion(sender(role="reader"), store=0, **fields))
        server = self.job.servers[0 if ask is None else ask.server]
        read = PublishedRead(server.shard.stores[0], request, Heap())
        while (reply := read.step(1)) is None:
            pass
        if ask is None:
            self.newest = reply if reply.number else None
            return
        self.copy.take(ask, sent(reply))
        if not self.asked and not list(self.copy.asks()):
            self.write()

    def write(self) -> None:
        array = self.copy.arrays["w"]
        array.write(self.out, False)
        array.written()
        assert self.memory.number >= self.version
        assert self.memory.label == f"v{self.memory.number}"
        self.version, self.newest = self.memory.number, None
        self.fetches.clear()
        for server in self.job.servers:
            has = self.job.part(server, self.out).view(torch.int16).numpy().view("u2").tolist()
            assert has == self.job.bits_of(server, self.version, has)


def play(seed: int, steps: int, takeovers: bool, servers: int = 2, **rule: Any) -> Job:
    rng = random.Random(seed)
    job = Job(servers, **rule)
    readers = [Reader(job)]
    readers.append(Reader(job, readers[0] if seed % 2 else None))
    for _ in range(steps):
        kind = rng.choice(
            ["push", "push", "publish", "deliver", "deliver", "deliver", "deliver", "ask", "hear", "hear"]
        )
        if kind == "push":
            job.push(rng.randrange(2))
        elif kind == "publish":
            job.publish()
        elif kind == "deliver":
            server = rng.choice(job.servers)
            server.deliver(rng.randrange(2))
            job.check(server)
        elif kind == "ask":
            readers[rng.random() < 0.2].ask()  # one of them is slow
        else:
            readers[rng.random() < 0.2].hear(rng.randrange(servers))
        if takeovers and rng.random() < 0.1:
            server = rng.choice(job.servers)
            job.check(server)
            server.crash(rng.random()) if rng.random() < 0.7 else server.take_over()
    job.settle()
    for _ in range(40 * servers):
        for reader in readers:
            reader.ask()
            reader.hear(0)
    assert [reader.version for reader in readers] == [job.number] * 2
    return job


@settings(max_examples=6)
@given(st.integers(0, 2**32))
def test_a_follower_has_whole_versions_with_the_published_bytes(seed: int) -> None:
    play(seed, 150, takeovers=False)


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_also_when_standbys_take_over(seed: int) -> None:
    play(seed, 150, takeovers=True)


@settings(max_examples=6)
@given(
    st.integers(0, 2**32),
    st.sampled_from(
        [{"quorum": 1}, {"quorum": 1, "late": "keep"}, {"mode": "async"}, {"mode": "async", "staleness": 1}]
    ),
)
def test_also_where_workers_are_not_in_step(seed: int, rule: dict[str, Any]) -> None:
    play(seed, 150, takeovers=True, **rule)


def test_a_follower_that_was_away_for_very_many_versions_has_the_newest_one_in_one_answer() -> None:
    job = Job(1)
    reader = Reader(job)
    for away in (1, 5, 300):
        for _ in range(away):
            for rank in (0, 1):
                job.push(rank)
            job.publish()
            job.settle()
        for _ in range(2):  # which version there is, and its changes
            reader.ask()
            assert len(reader.asked) == 1
            reader.hear(0)
        assert reader.version == job.number


@pytest.mark.parametrize("long", [1, 1 << 16])
def test_what_is_being_sent_does_not_change_with_the_next_version(long: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "LONG", long)
    job = Job(1)
    reader = Reader(job)
    replies = []
    for number in (1, 2):
        for rank in (0, 1):
            job.push(rank)
        job.publish()
        job.settle()
        reader.copy.note(job.servers[0].shard.stores[0].publishing.lineage, number, "")
        ask = next(reader.copy.asks())
        request = sent(wire.ReadVersion(sender(role="reader"), store=0, **reader.copy.fields(ask)))
        reply = PublishedRead(job.servers[0].shard.stores[0], request, Heap()).step(1 << 30)
        assert reply is not None
        replies.append((reply, sent(reply)))
    for reply, when_made in replies:
        assert b"".join(map(bytes, reply.buffers)) == b"".join(map(bytes, when_made.buffers))


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_a_server_that_takes_over_a_round_without_its_version_makes_it_before_the_next_round(part: float) -> None:
    job = Job(1)
    (server,) = job.servers
    for rank in (0, 0, 1):
        job.push(rank) if rank or not job.clocks[0] else job.publish()
    server.deliver(0)
    server.deliver(0)
    server.crash(part)
    for _ in range(2):
        job.push(0)
        job.push(1)
    job.settle()
    assert server.newest == 1
    job.check(server)
