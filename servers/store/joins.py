"""The workers of one store that are inside ``join``: they have nothing more to contribute for now. Pure.

A worker that pauses says how often it has pushed each segment, so the effect of its pause does not depend on when the
message arrives: the worker is in every round up to that push, and in none after it. When all workers have paused, all
contribute again. (This is Horovod's ``join``, without its zeros.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass

from kvstore import wire
from kvstore.errors import UsageError
from servers.names import name
from servers.requests.reasons import Reason


@dataclass(frozen=True)
class _Paused:
    peer: bytes
    request: wire.Pause
    clocks: Mapping[int, int]  # by segment: how often it has been pushed


class Pauses:
    """The pauses of one store, until all workers have paused."""

    def __init__(self) -> None:
        self._paused: dict[int, _Paused] = {}
        self._known = Counter[int]()  # by segment: how many of those that pause know it

    @property
    def ranks(self) -> Set[int]:
        """The ranks of the workers that pause, now and later."""
        return self._paused.keys()

    @property
    def requests(self) -> list[wire.Pause]:
        """Those of the workers that pause now."""
        return [paused.request for paused in self._paused.values()]

    @property
    def last(self) -> int:
        """The rank that has pushed most, the highest of several. At equal speeds it is the last to pause."""
        return max(self._paused, key=lambda rank: (self._paused[rank].request.pushes, rank))

    def add(self, peer: bytes, request: wire.Pause) -> dict[int, int]:
        """Note that a worker pauses; return how often it has pushed each segment that it knows.

        Raises:
            UsageError: the worker pauses already.
        """
        if request.node.rank in self._paused:
            raise UsageError(f"{request.node} is inside join() already")
        clocks = dict(zip(request.ids, request.clocks, strict=True))
        self._paused[request.node.rank] = _Paused(peer, request, clocks)
        self._known.update(clocks.keys())
        return clocks

    def knows(self, rank: int, segment: int) -> bool:
        """Return whether ``rank`` pauses, and has said how often it has pushed ``segment``."""
        return rank in self._paused and segment in self._paused[rank].clocks

    def all_know(self, segments: Collection[int]) -> bool:
        """Return whether each worker that pauses knows all ``segments``."""
        everyone = len(self._paused)
        return all(self._known[number] == everyone for number in segments)

    def require_before(self, push: wire.Push | wire.PushRows) -> None:
        """Raise ``UsageError`` if ``push`` comes after the pause of one of its workers."""
        if not self._paused:
            return
        for place, rank in enumerate(push.workers):
            paused = self._paused.get(rank)
            if paused is None:
                continue
            own = push.rank_clocks if isinstance(push, wire.Push) else ()
            clocks = [own[place]] * len(push.ids) if own else push.clocks
            if any(clock > paused.clocks.get(number, 0) for number, clock in zip(push.ids, clocks, strict=True)):
                raise UsageError(f"worker {rank} is inside join(), and must not push before all workers are")

    def end(self) -> list[tuple[bytes, wire.Pause]]:
        """Return, and forget, the requests of all workers that pause, with their links, in the order of ranks."""
        everyone = [(paused.peer, paused.request) for _, paused in sorted(self._paused.items())]
        self._paused.clear()
        self._known.clear()
        return everyone

    def explain(self, node: wire.Node, seq: int, workers: Collection[int]) -> Reason:
        """Say what request ``seq`` of ``node`` waits for; nothing if it is not a pause that waits."""
        paused = self._paused.get(node.rank)
        if paused is None or (paused.request.node, paused.request.seq) != (node, seq):
            return Reason()
        missing = set(workers) - self.ranks
        if not missing:
            return Reason("waits for pushes that are still on their way, since all workers have joined")
        return Reason(f"waits for {name('worker', missing)} to join", missing)
