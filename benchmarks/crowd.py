"""All messages of a large job through the product's own cores, without sockets, processes or waiting.

The cores of the scheduler, of each server and of an aggregator get the messages that members would send, as they would
come. Time is virtual. What is measured is the receiver's processor time for each message: to decode it, to decide, and
to encode what follows. Arrays are a thousandth of the network's, and so are the bounds that cut them. So messages are
as many and name as many segments as in the real job, while their elements cost next to nothing to move and add.
"""

from __future__ import annotations

import itertools
import math
import random
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.cores import Core, Said, Step
from benchmarks.networks import Shape
from kvstore import wire
from kvstore.client.entries import Entries, SegmentColumns
from kvstore.client.plans import Parcel, Plan
from kvstore.job.config import NETWORK_PIECE, bound_of
from kvstore.spec import Spec
from kvstore.transport.memory import Heap
from servers.aggregator.aggregator import Aggregator
from servers.aggregator.exchanges import Exchange
from servers.scheduler import Scheduler
from servers.shard import Shard

LESS = 1000  # arrays, bounds and pieces are smaller by this
LIMIT_S = 30.0
ADDRESS = "tcp://192.168.100.100:50000"


@dataclass(frozen=True)
class Crowd:
    """How large the job is.

    Attributes:
        hosts, workers_per_host, servers: how many.
        shapes: of the arrays.
        aggregated: whether one contribution leaves a host, or one for each worker.
        piece: bytes of a message, about.
    """

    hosts: int
    workers_per_host: int
    servers: int
    shapes: Sequence[Shape]
    aggregated: bool
    piece: int = NETWORK_PIECE

    @property
    def workers(self) -> int:
        """Of the job."""
        return self.hosts * self.workers_per_host

    @property
    def contributors(self) -> list[list[int]]:
        """For each contribution to a segment in a round, the ranks whose sum it is."""
        each = self.workers_per_host if self.aggregated else 1
        return [list(range(first, first + each)) for first in range(0, self.workers, each)]


class SimulatedJob:
    """The messages of all members, in order.

    Args:
        crowd: the job.
    """

    def __init__(self, crowd: Crowd) -> None:
        self.crowd = crowd
        self.keys = [f"layer{number // 3}.{number % 3}.weight" for number in range(len(crowd.shapes))]
        kinds: dict[Shape, int] = {}
        self.kinds = [kinds.setdefault((max(1, math.prod(shape) // LESS),), len(kinds)) for shape in crowd.shapes]
        self.specs = [Spec(shape, "float32") for shape in kinds]
        self.bound = max(1, bound_of(crowd.servers) // LESS)
        self.longest = max(1, crowd.piece // LESS)
        self._numbers = itertools.count(1)
        self._dice = random.Random(0)

    # ---- the scheduler's

    def schedule(self) -> tuple[list[Step], wire.Placed]:
        """Run the scheduler from the first member's request to join to the end of a job that fails.

        Returns:
            The steps, and where the keys are.
        """
        crowd, now = self.crowd, 0.0
        aggregators = crowd.hosts if crowd.aggregated else 0
        scheduler = Scheduler(crowd.workers, crowd.servers, LIMIT_S, 1.0, num_aggregators=aggregators)
        core = Core("scheduler", lambda peer, message: scheduler.handle(peer, message, now))
        workers = [wire.Node("worker", rank, 1) for rank in range(crowd.workers)]
        members = [wire.Node("server", rank, 1) for rank in range(crowd.servers)]
        members += [wire.Node("aggregator", rank, 1) for rank in range(aggregators)] + workers
        steps = [core.take("all join", map(self._join, itertools.count(), members))]
        assert len(core.last) == len(members)
        steps.append(core.take("all open a store", ((_link(who), wire.OpenStore(self._me(who), 1)) for who in workers)))
        steps.append(core.take("all but rank 0 declare keys", map(self._declare, workers[1:])))
        steps.append(core.take("rank 0 declares keys", [self._declare(workers[0])]))
        placed = core.last[0][1]
        assert isinstance(placed, wire.Placed)
        ready = wire.Ready(self._me(workers[0]), 0, list(self.keys))
        steps.append(core.take("rank 0 is ready", [(_link(workers[0]), ready)]))
        assert len(core.last) == crowd.workers
        steps.append(
            core.take("all come to a barrier", ((_link(who), wire.Barrier(self._me(who), 0, 1)) for who in workers))
        )
        assert len(core.last) == crowd.workers
        for _ in range(2):
            now += 1.0
            beats = core.take("beats of a second", ((_link(who), wire.Beat(who)) for who in members))
            pulses = core.take("pulses of a second", ((_link(who), wire.ProcessAlive(who)) for who in workers))
        steps += [beats, pulses]
        steps.append(core.take("one is lost", [(b"launcher", wire.Lost("worker", 1, "was killed"))]))
        assert len(core.last) == len(members) - 1
        steps.append(core.take("all leave", ((_link(who), wire.Leave(self._me(who), None)) for who in workers)))
        return steps, placed

    def _join(self, nonce: int, who: wire.Node) -> Said:
        own = who.rank // self.crowd.workers_per_host if self.crowd.aggregated and who.role == "worker" else -1
        sender = wire.Sender(who._replace(incarnation=nonce), 1, 0)
        return _link(who), wire.Join(sender, "" if who.role == "worker" else ADDRESS, own)

    def _declare(self, who: wire.Node) -> Said:
        shapes, dtypes = [list(spec.shape) for spec in self.specs], [spec.dtype for spec in self.specs]
        keys, kinds = list(self.keys), list(self.kinds)
        return _link(who), wire.Declare(self._me(who), 0, keys, kinds, shapes, dtypes, self.bound, self.longest)

    def _me(self, who: wire.Node) -> wire.Sender:
        number = next(self._numbers)
        return wire.Sender(who, number, 0)

    # ---- a server's

    def parcels(self, placed: wire.Placed) -> list[list[Parcel]]:
        """Return what each server gets of a contributor in a round, one parcel a message."""
        columns = (placed.counts, placed.ids, placed.servers, placed.starts, placed.stops)
        arrays = SegmentColumns(*(np.array(column, np.int64) for column in columns))
        plan = Plan(Entries.of(self.keys, self.kinds, self.specs, arrays), self.keys, self.longest)
        by_server: list[list[Parcel]] = [[] for _ in range(self.crowd.servers)]
        for parcel in plan.parcels:
            by_server[parcel.server].append(parcel)
        return by_server

    def serve(self, server: int, parcels: Sequence[Parcel], rounds: int = 2) -> list[Step]:
        """Run a server from its first worker to its last. Of the rounds, the last is counted."""
        core = self.server(server)
        workers = [wire.Node("worker", rank, 1) for rank in range(self.crowd.workers)]
        steps = [core.take("all open a store", ((_link(who), wire.Open(self._me(who), 0, "sync")) for who in workers))]
        steps.append(core.take("rank 0 gives values", map(self.first_values, parcels)))
        for number in range(1, rounds + 1):
            counted = core.take("a round", self.pushes(parcels, number))
            assert len(core.last) == len(self.crowd.contributors) or not parcels
        steps.append(counted)
        steps.append(core.take("all close the store", ((_link(who), wire.Close(self._me(who), 0)) for who in workers)))
        return steps

    def server(self, number: int) -> Core:
        """Return a new server's core."""
        aggregated = self.crowd.contributors if self.crowd.aggregated else []
        return Core("server", Shard(number, self.crowd.workers, aggregated=aggregated).handle)

    def first_values(self, parcel: Parcel) -> Said:
        """Return rank 0's message with the first values of a parcel's segments."""
        kinds, shapes = parcel.shapes()
        first = wire.Node("worker", 0, 1)
        zeros = [bytearray(parcel.nbytes)]
        return _link(first), wire.Init(
            self._me(first), 0, parcel.ids, parcel.keys(), kinds, shapes, parcel.dtype, zeros
        )

    def pushes(self, parcels: Sequence[Parcel], number: int) -> Iterator[Said]:
        """Yield the contributions of a round, parcel by parcel, in an order that changes from parcel to parcel."""
        done = next(self._numbers)  # all before has been answered
        for parcel in parcels:
            contributors = self.crowd.contributors
            self._dice.shuffle(contributors)
            values = [bytearray(parcel.nbytes)]
            for ranks in contributors:
                yield self._push(parcel, self._speaker(ranks), ranks, number, values, done)

    def _speaker(self, ranks: Sequence[int]) -> wire.Node:
        """Return who pushes for workers ``ranks``."""
        if self.crowd.aggregated:
            return wire.Node("aggregator", ranks[0] // self.crowd.workers_per_host, 1)
        return wire.Node("worker", ranks[0], 1)

    def _push(
        self, parcel: Parcel, who: wire.Node, ranks: list[int], number: int, values: list[bytearray], done: int
    ) -> Said:
        sender = wire.Sender(who, next(self._numbers), done)
        clocks = [number] * len(parcel.ids)
        spoken_for = ranks if who.role == "aggregator" else []
        return _link(who), wire.Push(sender, 0, parcel.ids, clocks, True, None, None, ranks=spoken_for, buffers=values)

    # ---- an aggregator's

    def aggregate(self, placed: wire.Placed, rounds: int = 2) -> list[Step]:
        """Run the first host's aggregator. Of the rounds, the last is counted: pushes, and servers' answers."""
        workers = [wire.Node("worker", rank, 1) for rank in range(self.crowd.workers_per_host)]
        upstream = _Upstream()
        aggregator = Aggregator([who.rank for who in workers], Heap(), upstream)
        pushing = Core("aggregator", lambda peer, message: aggregator.handle(peer, message, 0.0))
        answering = Core("aggregator", lambda _, reply: aggregator.answered(upstream.under_way.pop(reply.seq), reply))
        opened = pushing.take(
            "its workers open a store", ((_link(who), wire.Open(self._me(who), 0, "sync")) for who in workers)
        )
        described = pushing.take("its workers describe keys", (self._describe(who, placed) for who in workers))
        for number in range(1, rounds + 1):
            pushed = pushing.take("a round: pushes", self._host_pushes(placed, number))
            assert upstream.under_way
            answered = answering.take("a round: answers", list(upstream.replies()))
            assert len(answering.last) == len(workers)
            assert not upstream.under_way
        return [opened, described, pushed, answered]

    def _describe(self, who: wire.Node, placed: wire.Placed) -> Said:
        shapes, dtypes = [list(spec.shape) for spec in self.specs], [spec.dtype for spec in self.specs]
        sizes = [stop - start for start, stop in zip(placed.starts, placed.stops, strict=True)]
        keys, kinds = list(self.keys), list(self.kinds)
        columns = (list(placed.counts), list(placed.ids), list(placed.servers), sizes)
        return _link(who), wire.Describe(self._me(who), 0, keys, kinds, shapes, dtypes, *columns)

    def _host_pushes(self, placed: wire.Placed, number: int) -> Iterator[Said]:
        done = next(self._numbers)
        for parcel in itertools.chain(*self.parcels(placed)):
            values = [bytearray(parcel.nbytes)]
            for rank in range(self.crowd.workers_per_host):
                yield self._push(parcel, wire.Node("worker", rank, 1), [], number, values, done)

    # ---- memory

    def held_mb(self) -> dict[str, float]:
        """Return what the scheduler holds when all declarations wait, and a server before the end of its round."""
        held = {}
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            _, placed = self.schedule()
            held["scheduler"] = tracemalloc.get_traced_memory()[1] - before
            parcels = max(self.parcels(placed), key=len)
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            self.serve(0, parcels)
            held["server"] = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
        return {role: size / 1e6 for role, size in held.items()}


class _Upstream:
    """The servers of an aggregator: they answer when they are told to.

    Attributes:
        under_way: by the number of the request, what has not been answered.
    """

    def __init__(self) -> None:
        self.under_way: dict[int, Exchange] = {}
        self._numbers = itertools.count(1)

    def send(self, exchange: Exchange) -> None:
        """Encode a request, as it would be sent."""
        exchange.seq = next(self._numbers)
        self.under_way[exchange.seq] = exchange
        wire.encode(exchange.kind(wire.Sender(wire.Node("aggregator", 0, 1), exchange.seq, 0), **exchange.fields))

    def explain(self, exchange: Exchange, peer: bytes, seq: int) -> None:
        """Do nothing: nobody asks."""

    def replies(self) -> Iterator[Said]:
        """Yield the answer to each request."""
        for seq, exchange in self.under_way.items():
            yield b"server", wire.Values(seq, buffers=[bytearray(exchange.listed.nbytes)])


def _link(who: wire.Node) -> bytes:
    return b"%s %d" % (who.role.encode(), who.rank)
