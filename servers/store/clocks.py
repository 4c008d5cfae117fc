"""How often each worker has pushed one bucket, where every push is an update of its own. Pure.

``WorkerClocks`` has the interface of ``Rounds``. Its ``version`` is how often the slowest worker has pushed, so that a
read by a worker that is too far ahead waits for a version, as one in rounds does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class WorkerClocks(Generic[T]):
    """How often each worker has pushed. A worker that pauses is not counted until all resume, at the highest clock.

    Args:
        workers: their ranks.
        clocks: by rank; None for zeros.

    Attributes:
        version: the lowest clock.
    """

    idle = True
    settled = True
    version: int

    def __init__(self, workers: Collection[int], clocks: dict[int, int] | None = None) -> None:
        self._clocks = dict.fromkeys(sorted(workers), 0) if clocks is None else clocks
        self._paused: dict[int, int] = {}
        self._look()

    @property
    def untouched(self) -> bool:
        """Whether nobody has pushed yet."""
        return not any(self._clocks.values()) and not self._paused

    @property
    def one_behind(self) -> bool:
        """Whether one worker has pushed less often than all others."""
        return self._counts[self.version] == 1 and len(self._clocks) > 1

    @property
    def state(self) -> tuple[dict[int, int], dict[int, int]]:
        """What must be equal for two buckets to be merged."""
        return self._clocks, self._paused

    @property
    def clocks(self) -> Mapping[int, int]:
        """By rank, how often a worker has pushed, one that pauses too."""
        return self._clocks | self._paused

    def restore(self, version: int, clocks: Mapping[int, int]) -> None:
        """Be where another server is, whose ``clocks`` these are; nobody pauses. The version follows from them."""
        self._clocks, self._paused = dict(sorted(clocks.items())), {}
        self._look()

    def copy(self) -> WorkerClocks[T]:
        """Return clocks with the same values."""
        made: WorkerClocks[T] = WorkerClocks((), dict(self._clocks))
        made._paused = dict(self._paused)
        made._look()
        return made

    def open(self) -> list[tuple[int, Sequence[int], T]]:
        """Return nothing: every contribution becomes an update at once."""
        return []

    def expects(self, ranks: Sequence[int], clock: int) -> bool:
        """Return True: a push that a later one of ``ranks`` has overtaken is an update, too."""
        return True

    def counts(self, ranks: Sequence[int], clock: int) -> bool:
        """Return False: here the ledger knows which pushes are repeats."""
        return False

    def contribute(self, ranks: Sequence[int], clock: int, item: T) -> bool:
        """Note that each of ``ranks`` has pushed ``clock`` times; return whether that is news of one of them."""
        behind = [rank for rank in ranks if self._clocks.get(rank, clock) < clock]
        if not behind:
            return False
        self._counts[clock] += len(behind)
        for rank in behind:
            self._counts[self._clocks[rank]] -= 1
            if not self._counts[self._clocks[rank]]:
                del self._counts[self._clocks[rank]]
            self._clocks[rank] = clock
        if self.version not in self._counts:
            self.version = min(self._counts)
        return True

    def complete(self) -> list[T] | None:
        """Return None: there are no rounds to close."""
        return None

    def factor(self, contributors: int) -> float:
        """Return 1: each push is an update of its own."""
        return 1.0

    def missing(self, clock: int) -> dict[int, int]:
        """Return who has pushed less often than ``clock``: by rank, the first push that is missing."""
        return {rank: pushed + 1 for rank, pushed in self._clocks.items() if pushed < clock}

    def leave(self, ranks: Collection[int]) -> None:
        """Note that workers have left: nobody waits for them any more."""
        for rank in ranks:
            self._clocks.pop(rank, None)
            self._paused.pop(rank, None)
        self._look()

    def pause(self, rank: int, clock: int) -> None:
        """Do not wait for ``rank``, which has pushed ``clock`` times, until ``resume``."""
        if rank in self._clocks:
            self._paused[rank] = max(clock, self._clocks.pop(rank))
            self._look()

    def resume(self) -> None:
        """Count everybody again, as if each had pushed as often as the worker with most pushes."""
        everyone = self._clocks | self._paused
        self._clocks = dict.fromkeys(sorted(everyone), max(everyone.values(), default=0))
        self._paused = {}
        self._look()

    def _look(self) -> None:
        self._counts = Counter(self._clocks.values())  # how many workers have pushed so often; no zeros
        self.version = min(self._counts, default=1 << 62)
