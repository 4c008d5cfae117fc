"""Which workers have come to which barrier of one store. Pure."""

from __future__ import annotations

from collections.abc import Collection, Set
from typing import NamedTuple

from kvstore import wire

Waiter = tuple[bytes, wire.Barrier]


class UnfinishedBarrier(NamedTuple):
    """A barrier at which somebody waits.

    Attributes:
        waiting, missing: the ranks that wait, and those that have not come.
        since: when the first of them came.
    """

    waiting: list[int]
    missing: Set[int]
    since: float


class Barriers:
    """The barriers of one store. The n-th call of each worker is its coming to barrier n.

    Args:
        workers: the ranks of all workers.
    """

    def __init__(self, workers: Collection[int]) -> None:
        self._workers = frozenset(workers)
        # By number, those that are not over: by rank, who has come; None for a worker that has been answered.
        self._arrived: dict[int, dict[int, Waiter | None]] = {}
        self._since: dict[int, float] = {}  # by number: when the first of those came

    def arrive(self, peer: bytes, request: wire.Barrier, now: float = 0.0) -> list[Waiter]:
        """Note that a worker has come; return all to be answered if it was the last."""
        arrived = self._arrived.setdefault(request.number, {})
        self._since.setdefault(request.number, now)
        arrived[request.node.rank] = (peer, request)
        if len(arrived) < len(self._workers):
            return []
        del self._arrived[request.number], self._since[request.number]
        return _waiting(arrived)

    def missing(self, number: int, among: Collection[int]) -> set[int]:
        """Return those of ``among`` who have not come to barrier ``number``."""
        arrived = self._arrived.get(number, {})
        return {rank for rank in among if rank not in arrived}

    def without(self, rank: int) -> list[int]:
        """Return the numbers of the barriers to which others have come and ``rank`` has not."""
        return [number for number, arrived in self._arrived.items() if rank not in arrived]

    def fail(self, number: int) -> list[Waiter]:
        """Return those who wait at a barrier that cannot complete. They count as having come."""
        waiting = _waiting(self._arrived.get(number, {}))
        self._arrived[number] = dict.fromkeys(self._arrived.get(number, {}))
        return waiting

    def send_away(self, number: int, left: Collection[int]) -> list[Waiter]:
        """Return those who wait at barrier ``number``, who have to come again, unless they have ``left``."""
        arrived = self._arrived.pop(number, {})
        self._since.pop(number, None)
        stay = {rank: waiter for rank, waiter in arrived.items() if rank in left}
        if stay:
            self._arrived[number] = stay
        return _waiting({rank: waiter for rank, waiter in arrived.items() if rank not in left})

    def waits(self, rank: int) -> bool:
        """Return whether ``rank`` waits at any barrier."""
        return any(arrived.get(rank) is not None for arrived in self._arrived.values())

    def awaited(self, rank: int, seq: int) -> Set[int]:
        """Return the ranks that request ``seq`` of worker ``rank`` waits for; none if it does not wait at a barrier."""
        for arrived in self._arrived.values():
            waiter = arrived.get(rank)
            if waiter is not None and waiter[1].seq == seq:
                return self._workers - arrived.keys()
        return frozenset()

    def unfinished(self) -> list[UnfinishedBarrier]:
        """Return the barriers at which somebody waits."""
        barriers = []
        for number, arrived in self._arrived.items():
            waiting = sorted(rank for rank, waiter in arrived.items() if waiter is not None)
            if waiting:
                barriers.append(
                    UnfinishedBarrier(waiting, self._workers - arrived.keys(), self._since.get(number, 0.0))
                )
        return barriers


def _waiting(arrived: dict[int, Waiter | None]) -> list[Waiter]:
    return [waiter for waiter in arrived.values() if waiter is not None]
