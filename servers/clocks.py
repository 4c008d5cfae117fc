"""How often each worker has pushed one bucket, where every push is an update of its own. Pure.

It has the interface of ``Rounds``: ``version`` is how often the slowest worker has pushed, so that a read which may be
so far ahead of that and no farther waits in the same way as one for a round.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, TypeVar

T = TypeVar("T")


class Clocks(Generic[T]):
    """The clocks of ``workers``, given by rank."""

    idle = True

    def __init__(self, workers: Collection[int], clocks: dict[int, int] | None = None) -> None:
        self._clocks = dict.fromkeys(sorted(workers), 0) if clocks is None else clocks
        self.version = min(self._clocks.values(), default=0)

    @property
    def state(self) -> tuple[tuple[int, int], ...]:
        """What two buckets must have in common to become one."""
        return tuple(self._clocks.items())

    def copy(self) -> Clocks[T]:
        """Return the same."""
        return Clocks((), dict(self._clocks))

    def open(self) -> list[tuple[int, int, T]]:
        """Return nothing: an update is made at once."""
        return []

    def contribute(self, rank: int, clock: int, item: T) -> bool:
        """Note that ``rank`` has pushed ``clock`` times."""
        if clock <= self._clocks.get(rank, clock):
            return False
        self._clocks[rank] = clock
        self.version = min(self._clocks.values())
        return True

    def complete(self) -> list[T] | None:
        """Return None: there is nothing left to do."""
        return None

    def missing(self, clock: int) -> dict[int, int]:
        """Return who has pushed less often than ``clock``: by rank, the first push that is missing."""
        return {rank: its + 1 for rank, its in self._clocks.items() if its < clock}

    def leave(self, ranks: Collection[int]) -> None:
        """Nobody waits any more for workers that have left."""
        for rank in ranks:
            self._clocks.pop(rank, None)
        self.version = min(self._clocks.values(), default=1 << 62)
