"""Who has contributed to which round of one bucket. Pure.

Each worker's n-th push is its contribution to round n. A round is complete when every worker has contributed; rounds
complete in order, whatever order contributions come in, and give them in the order of ranks, so that their sum has the
same bits every time. ``dist_sync`` applies a round when it is complete; ``version`` says how many have been.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, TypeVar

T = TypeVar("T")


class Rounds(Generic[T]):
    """The rounds of one bucket among ``workers``, given by rank; ``version`` of them are over."""

    def __init__(self, workers: Collection[int], version: int = 0) -> None:
        self.version = version
        self._workers = frozenset(workers)
        self._open: dict[int, dict[int, T]] = {}

    @property
    def idle(self) -> bool:
        """Whether nobody has contributed to a round that is not over."""
        return not self._open

    def open(self) -> list[tuple[int, int, T]]:
        """Return what has come for rounds that are not over: (clock, rank, item)."""
        return [(clock, rank, item) for clock, items in self._open.items() for rank, item in items.items()]

    def contribute(self, rank: int, clock: int, item: T) -> bool:
        """Take the contribution of ``rank`` to round ``clock``; False if it came before."""
        if clock <= self.version or rank not in self._workers:
            return False
        contributions = self._open.setdefault(clock, {})
        if rank in contributions:
            return False
        contributions[rank] = item
        return True

    def complete(self) -> list[T] | None:
        """Close the next round if it is complete, and return its contributions in rank order."""
        contributions = self._open.get(self.version + 1)
        if contributions is None or len(contributions) < len(self._workers):
            return None
        self.version += 1
        del self._open[self.version]
        return [contributions[rank] for rank in sorted(contributions)]

    def missing(self, clock: int) -> dict[int, int]:
        """Return what must still come before round ``clock`` is complete: by rank, the first round it is missing in."""
        missing: dict[int, int] = {}
        for rank in self._workers:
            number = self.version + 1
            while rank in self._open.get(number, ()):
                number += 1
            if number <= clock:
                missing[rank] = number
        return missing
