"""Who has come to which barrier. Pure."""

from __future__ import annotations

from collections.abc import Collection

from kvstore.wire import Barrier


class Barriers:
    """The barriers of one store; the n-th call of one worker meets the n-th of the others."""

    def __init__(self, workers: Collection[int]) -> None:
        self._workers = frozenset(workers)
        self._here: dict[int, dict[int, tuple[bytes, Barrier]]] = {}

    def arrive(self, peer: bytes, request: Barrier) -> list[tuple[bytes, Barrier]]:
        """Note that a worker has come; return everybody to let go if it was the last."""
        here = self._here.setdefault(request.number, {})
        here[request.rank] = (peer, request)
        if here.keys() < self._workers:
            return []
        del self._here[request.number]
        return list(here.values())

    def abandon(self, departed: Collection[int]) -> list[tuple[bytes, Barrier, set[int]]]:
        """Return, and forget, those who wait for workers that have left, with the ranks of these."""
        hopeless: list[tuple[bytes, Barrier, set[int]]] = []
        for number, here in list(self._here.items()):
            missing = set(departed) - here.keys()
            if missing:
                hopeless += [(peer, request, missing) for peer, request in here.values()]
                del self._here[number]
        return hopeless

    def explain(self, rank: int, seq: int) -> str:
        """Say what the request ``seq`` of worker ``rank`` waits for."""
        for here in self._here.values():
            if rank in here and here[rank][1].seq == seq:
                missing = sorted(self._workers - here.keys())
                return "waits at the barrier for " + ", ".join(f"worker {other}" for other in missing)
        return ""
