"""How often each worker has pushed one bucket, where every push is an update of its own. Pure.

It has the interface of ``Rounds``: ``version`` is how often the slowest worker has pushed, so that a read which may be
so far ahead of that and no farther waits in the same way as one for a round.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, TypeVar

T = TypeVar("T")


class WorkerClocks(Generic[T]):
    """The clocks of ``workers``, given by rank; one that pauses is not counted until all resume where the first is."""

    idle = True
    settled = True

    def __init__(self, workers: Collection[int], clocks: dict[int, int] | None = None) -> None:
        self._clocks = dict.fromkeys(sorted(workers), 0) if clocks is None else clocks
        self._paused: dict[int, int] = {}
        self.version = min(self._clocks.values(), default=0)

    @property
    def untouched(self) -> bool:
        """Whether nobody has pushed anything yet."""
        return not any(self._clocks.values()) and not self._paused

    @property
    def state(self) -> tuple[dict[int, int], dict[int, int]]:
        """What two buckets must have in common to become one."""
        return self._clocks, self._paused

    def copy(self) -> WorkerClocks[T]:
        """Return the same."""
        made: WorkerClocks[T] = WorkerClocks((), dict(self._clocks))
        made._paused = dict(self._paused)
        made._look()
        return made

    def open(self) -> list[tuple[int, int, T]]:
        """Return nothing: an update is made at once."""
        return []

    def expects(self, rank: int, clock: int) -> bool:
        """Return True: a push that another one of ``rank`` has overtaken is an update too."""
        return True

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
            self._paused.pop(rank, None)
        self._look()

    def pause(self, rank: int, clock: int) -> None:
        """Do not count ``rank``, which has pushed ``clock`` times, among those whom others may be ahead of."""
        if rank in self._clocks:
            self._paused[rank] = max(clock, self._clocks.pop(rank))
            self._look()

    def resume(self) -> None:
        """Count everybody again, as if all had pushed as often as whoever has pushed most."""
        everyone = self._clocks | self._paused
        self._clocks = dict.fromkeys(sorted(everyone), max(everyone.values(), default=0))
        self._paused = {}
        self._look()

    def _look(self) -> None:
        self.version = min(self._clocks.values(), default=1 << 62)
