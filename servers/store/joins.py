"""Which workers of one store have nothing more to contribute for now, and after which push of what. Pure.

A worker that pauses says how often it has pushed each segment, so what its pause means does not depend on when it
comes: the worker is in every round up to there, and in none beyond. When all workers have paused, everyone contributes
again. (Horovod's ``join``, without its zeros.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvstore.errors import UsageError
from kvstore.wire import Pause, Push
from servers.names import name


@dataclass(frozen=True)
class _Paused:
    peer: bytes
    request: Pause
    clocks: Mapping[int, int]  # by segment: how often it has been pushed


class Pauses:
    """The pauses of one store, until all workers have paused."""

    def __init__(self) -> None:
        self._paused: dict[int, _Paused] = {}

    @property
    def ranks(self) -> frozenset[int]:
        """Who pauses."""
        return frozenset(self._paused)

    @property
    def last(self) -> int:
        """Who has pushed most, of several the highest: it is the last to pause, if all are equally fast."""
        return max(self._paused, key=lambda rank: (self._paused[rank].request.pushes, rank))

    def add(self, peer: bytes, request: Pause) -> dict[int, int]:
        """Note that a worker pauses; return how often it has pushed each segment that it knows.

        Raises:
            UsageError: it pauses already.
        """
        if request.node.rank in self._paused:
            raise UsageError(f"{request.node} has joined already")
        clocks = dict(zip(request.ids, request.clocks, strict=True))
        self._paused[request.node.rank] = _Paused(peer, request, clocks)
        return clocks

    def knows(self, rank: int, segment: int) -> bool:
        """Whether ``rank`` pauses, and has said how often it has pushed ``segment``."""
        return rank in self._paused and segment in self._paused[rank].clocks

    def require_before(self, push: Push) -> None:
        """Raise ``UsageError`` if ``push`` is one that its worker has said it would not make."""
        paused = self._paused.get(push.node.rank)
        if paused is not None and any(
            clock > paused.clocks.get(number, 0) for number, clock in zip(push.ids, push.clocks, strict=True)
        ):
            raise UsageError(f"{push.node} has joined, and pushes before all others have")

    def end(self) -> list[tuple[bytes, Pause]]:
        """Return everybody, and forget them."""
        everyone = [(paused.peer, paused.request) for _, paused in sorted(self._paused.items())]
        self._paused.clear()
        return everyone

    def explain(self, rank: int, seq: int, workers: Collection[int]) -> str:
        """Say what the request ``seq`` of worker ``rank`` waits for, if it is a pause."""
        paused = self._paused.get(rank)
        if paused is None or paused.request.seq != seq:
            return ""
        missing = set(workers) - self.ranks
        if not missing:
            return "waits for pushes that are still on their way, since all workers have joined"
        return f"waits for {name('worker', missing)} to join"
