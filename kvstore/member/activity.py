"""What a worker's process has done so far: counted where it happens, and reported with its heartbeats."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvstore import wire
from kvstore.job.system import cpu_us, memory_bytes
from kvstore.member.client import Client
from kvstore.transport import Peer
from kvstore.wire.guests import MOST_VALUES

MICRO = 1_000_000


class StoreActivity(NamedTuple):
    """How often a worker has pushed its most pushed key, and how far it was ahead of the slowest when it last read."""

    rounds: int
    ahead: int = 0


class WorkerActivity:
    """What one worker has done so far. Any thread may use it; a report may be of two moments that are close.

    ``peers`` returns the links that take its pushes. ``stores`` return, for each open store, what has been done in it.
    """

    def __init__(self, client: Client, clock: Callable[[], float], peers: Callable[[], list[Peer]]) -> None:
        self.stores: list[Callable[[], StoreActivity]] = []
        self._client = client
        self._clock = clock
        self._peers = peers
        self._input_s: float | None = None
        self._values: dict[str, float] = {}
        self._rounds = 0

    def read_input(self, seconds: float) -> None:
        """The program has waited so long for data."""
        self._input_s = (self._input_s or 0.0) + seconds

    def log(self, values: Mapping[str, float]) -> None:
        """Take values that the program logs; each replaces the value of its name. Numbers only, not NaN."""
        finite = {name[:64]: float(value) for name, value in values.items() if math.isfinite(value)}
        merged = {**self._values, **finite}
        self._values = dict(list(merged.items())[:MOST_VALUES])

    def report(self) -> wire.WorkerReport:
        now = self._clock()
        stores = [activity() for activity in list(self.stores)]
        self._rounds = max((self._rounds, *(store.rounds for store in stores)))  # closing a store loses no rounds
        links, peers = self._client.links, self._peers()
        return wire.WorkerReport(
            self._client.node,
            at=now,
            rounds=self._rounds,
            blocked_us=int(MICRO * self._client.blocked.total(now)),
            input_us=-1 if self._input_s is None else int(MICRO * self._input_s),
            cpu_us=cpu_us(),
            memory=memory_bytes(),
            outstanding=len(links.outstanding),
            ahead=max((store.ahead for store in stores), default=0),
            sent=[links.sent.get(peer, 0) for peer in peers],
            received=[links.received.get(peer, 0) for peer in peers],
            values=[[name, value] for name, value in self._values.items()],
        )
