"""Who has come to which barrier. Pure."""

from __future__ import annotations

from collections.abc import Collection, Set

from kvstore.wire import Barrier

Waiter = tuple[bytes, Barrier]


class Barriers:
    """The barriers of one store; the n-th call of one worker meets the n-th of the others.

    Args:
        workers: the ranks of those who come.
    """

    def __init__(self, workers: Collection[int]) -> None:
        self._workers = frozenset(workers)
        # By number: who has come to a barrier that is not over; None for a worker that has had its answer.
        self._here: dict[int, dict[int, Waiter | None]] = {}

    def arrive(self, peer: bytes, request: Barrier) -> list[Waiter]:
        """Note that a worker has come; return everybody to let go if it was the last."""
        here = self._here.setdefault(request.number, {})
        here[request.node.rank] = (peer, request)
        if len(here) < len(self._workers):
            return []
        del self._here[request.number]
        return _waiting(here)

    def missing(self, number: int, among: Collection[int]) -> set[int]:
        """Those of ``among`` who have not come to barrier ``number``."""
        here = self._here.get(number, {})
        return {rank for rank in among if rank not in here}

    def without(self, rank: int) -> list[int]:
        """The numbers of the barriers to which others have come and ``rank`` has not."""
        return [number for number, here in self._here.items() if rank not in here]

    def fail(self, number: int) -> list[Waiter]:
        """Return those who wait at a barrier that will never be over. They count as having come."""
        waiting = _waiting(self._here.get(number, {}))
        self._here[number] = dict.fromkeys(self._here.get(number, {}))
        return waiting

    def send_away(self, number: int, left: Collection[int]) -> list[Waiter]:
        """Return those who wait at barrier ``number``, who have to come again, unless they have ``left``."""
        here = self._here.pop(number, {})
        stay = {rank: waiter for rank, waiter in here.items() if rank in left}
        if stay:
            self._here[number] = stay
        return _waiting({rank: waiter for rank, waiter in here.items() if rank not in left})

    def waits(self, rank: int) -> bool:
        """Whether ``rank`` waits at any barrier."""
        return any(here.get(rank) is not None for here in self._here.values())

    def awaited(self, rank: int, seq: int) -> Set[int]:
        """For whom the request ``seq`` of worker ``rank`` waits; nobody if it is none that waits here."""
        for here in self._here.values():
            waiter = here.get(rank)
            if waiter is not None and waiter[1].seq == seq:
                return self._workers - here.keys()
        return frozenset()


def _waiting(here: dict[int, Waiter | None]) -> list[Waiter]:
    return [waiter for waiter in here.values() if waiter is not None]
