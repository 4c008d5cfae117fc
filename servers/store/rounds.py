"""Who has contributed to which round of one bucket. Pure.

Each worker's n-th push is its contribution to round n. A round is complete when every worker has contributed, or as
many as the quorum asks for. Rounds are closed in order, whatever the order of contributions, and a round's
contributions are in the order of ranks, so that their sum has the same bits every time. A worker that pauses after its
n-th push is in no later round until all resume.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, TypeVar

T = TypeVar("T")


class Rounds(Generic[T]):
    """The rounds of one bucket.

    Args:
        workers: the ranks of those who contribute.
        version: how many rounds are over.
        quorum: how many contributions complete a round; None for all.
        keep: whether a contribution to a round that is over counts in the next one; else it does not count.

    Attributes:
        version: how many rounds are over.
        share: how many workers the last round was of.
    """

    def __init__(
        self, workers: Collection[int], version: int = 0, quorum: int | None = None, keep: bool = False
    ) -> None:
        self.version = version
        self._workers = frozenset(workers)
        self._quorum = quorum
        self._keep = keep
        self.share = len(self._workers)
        self._left: frozenset[int] = frozenset()
        self._paused: dict[int, int] = {}  # by rank: the last round it is in
        self._open: dict[int, dict[int, T]] = {}
        self._late: list[tuple[int, int, T]] = []

    @property
    def untouched(self) -> bool:
        """Whether nobody has contributed yet."""
        return not self.version and self.idle

    @property
    def idle(self) -> bool:
        """Whether no round is open: nobody has contributed to one that is not over."""
        return not self._open and not self._late

    @property
    def state(self) -> tuple[int, dict[int, int]]:
        """What must be equal for two idle buckets to be merged."""
        return self.version, self._paused

    @property
    def settled(self) -> bool:
        """Whether the rounds up to the last push of every worker that pauses are over; True if not all pause."""
        return len(self._paused) < len(self._workers) or self.version >= max(self._paused.values())

    def copy(self) -> Rounds[T]:
        """Return rounds of the same version and pauses, of which none is open."""
        made: Rounds[T] = Rounds(self._workers, self.version, self._quorum, self._keep)
        made.leave(self._left)
        made._paused = dict(self._paused)
        return made

    def open(self) -> list[tuple[int, int, T]]:
        """Return the contributions that belong to no closed round: (clock, rank, item)."""
        return [(clock, rank, item) for clock, items in self._open.items() for rank, item in items.items()] + self._late

    def expects(self, rank: int, clock: int) -> bool:
        """Return whether round ``clock`` is not over, and ``rank`` is in it and has not contributed."""
        return (
            rank in self._workers
            and self.version < clock <= self._paused.get(rank, clock)
            and rank not in self._open.get(clock, ())
        )

    def contribute(self, rank: int, clock: int, item: T) -> bool:
        """Take a contribution to round ``clock``; return False if the round is over, or it has one of ``rank``."""
        if rank not in self._workers or clock > self._paused.get(rank, clock):
            return False
        if clock <= self.version:
            if self._keep and self._quorum is not None:
                self._late.append((clock, rank, item))
            return False
        contributions = self._open.setdefault(clock, {})
        if rank in contributions:
            return False
        contributions[rank] = item
        return True

    def complete(self) -> list[T] | None:
        """Close the next round if it is complete, and return its contributions in rank order, late ones last."""
        contributions = self._open.get(self.version + 1)
        if contributions is None or len(contributions) < self._enough():
            return None
        self.version += 1
        self.share = len(self._within(self.version))
        del self._open[self.version]
        late = [item for _, _, item in sorted(self._late, key=lambda entry: entry[:2])]
        self._late.clear()
        return [contributions[rank] for rank in sorted(contributions)] + late

    def missing(self, clock: int) -> dict[int, int]:
        """Return who must contribute before round ``clock`` is over: by rank, the first round that lacks it."""
        missing: dict[int, int] = {}
        for rank in self._workers - self._left:
            number = self.version + 1
            while rank in self._open.get(number, ()):
                number += 1
            if number <= min(clock, self._paused.get(rank, clock)):
                missing[rank] = number
        return missing

    def leave(self, ranks: Collection[int]) -> None:
        """Note which workers have left. With a quorum, rounds do without them; else theirs can never be complete."""
        if self._quorum is not None:
            self._left = frozenset(ranks) & self._workers

    def pause(self, rank: int, clock: int) -> None:
        """Take ``rank`` out of the rounds after ``clock``."""
        if rank in self._workers:
            self._paused[rank] = clock

    def resume(self) -> None:
        """Let everybody be in the next round again."""
        self._paused.clear()

    def _within(self, number: int) -> Collection[int]:
        """Return the workers that are in round ``number``."""
        if not self._paused:
            return self._workers
        return frozenset(rank for rank in self._workers if self._paused.get(rank, number) >= number)

    def _enough(self) -> int:
        """Return how many contributions complete the next round."""
        within = frozenset(self._within(self.version + 1))
        if self._quorum is None:
            return len(within)
        return max(1, min(self._quorum, len(within - self._left)))
