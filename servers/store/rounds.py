"""Who has contributed to which round of one bucket. Pure.

Each worker's n-th push is its contribution to round n. A round is complete when every worker has contributed, or as
many as the quorum asks for; rounds complete in order, whatever order contributions come in, and give them in the order
of ranks, so that their sum has the same bits every time. ``version`` says how many rounds are over. A worker that
pauses after its n-th push is in no later round until all resume.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, TypeVar

T = TypeVar("T")


class Rounds(Generic[T]):
    """The rounds of one bucket.

    Args:
        workers: who contributes, by rank.
        version: how many rounds are over.
        quorum: how many contributions complete a round; None for all.
        keep: whether a contribution to a round that is over counts in the next one, instead of not at all.
    """

    def __init__(
        self, workers: Collection[int], version: int = 0, quorum: int | None = None, keep: bool = False
    ) -> None:
        self.version = version
        self._workers = frozenset(workers)
        self._quorum = quorum
        self._keep = keep
        self.share = len(self._workers)  # of how many workers the last round was
        self._left: frozenset[int] = frozenset()
        self._paused: dict[int, int] = {}  # by rank: the last round it is in
        self._open: dict[int, dict[int, T]] = {}
        self._late: list[tuple[int, int, T]] = []

    @property
    def untouched(self) -> bool:
        """Whether nobody has contributed anything yet."""
        return not self.version and self.idle

    @property
    def idle(self) -> bool:
        """Whether nobody has contributed to a round that is not over."""
        return not self._open and not self._late

    @property
    def state(self) -> tuple[int, dict[int, int]]:
        """What two buckets must have in common to become one, if both are idle."""
        return self.version, self._paused

    @property
    def settled(self) -> bool:
        """Whether the rounds before everybody's pause are over; True if not all have said what theirs is."""
        return len(self._paused) < len(self._workers) or self.version >= max(self._paused.values())

    def copy(self) -> Rounds[T]:
        """Return rounds as far as these, with nothing open."""
        made: Rounds[T] = Rounds(self._workers, self.version, self._quorum, self._keep)
        made.leave(self._left)
        made._paused = dict(self._paused)
        return made

    def open(self) -> list[tuple[int, int, T]]:
        """Return what has come for rounds that are not over: (clock, rank, item)."""
        return [(clock, rank, item) for clock, items in self._open.items() for rank, item in items.items()] + self._late

    def expects(self, rank: int, clock: int) -> bool:
        """Whether ``rank`` is in round ``clock``, which is not over, and has not contributed to it."""
        return (
            rank in self._workers
            and self.version < clock <= self._paused.get(rank, clock)
            and rank not in self._open.get(clock, ())
        )

    def contribute(self, rank: int, clock: int, item: T) -> bool:
        """Take the contribution of ``rank`` to round ``clock``; False if it is too late, or has come before."""
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
        """Return what must still come before round ``clock`` is complete: by rank, the first round it is missing in."""
        missing: dict[int, int] = {}
        for rank in self._workers - self._left:
            number = self.version + 1
            while rank in self._open.get(number, ()):
                number += 1
            if number <= min(clock, self._paused.get(rank, clock)):
                missing[rank] = number
        return missing

    def leave(self, ranks: Collection[int]) -> None:
        """With a quorum, do without workers that have left; else a round that needs one can never be complete."""
        if self._quorum is not None:
            self._left = frozenset(ranks) & self._workers

    def pause(self, rank: int, clock: int) -> None:
        """Do without ``rank`` in the rounds after ``clock``."""
        if rank in self._workers:
            self._paused[rank] = clock

    def resume(self) -> None:
        """Count on everybody again from the next round on."""
        self._paused.clear()

    def _within(self, number: int) -> Collection[int]:
        """The workers that do not pause before round ``number``."""
        if not self._paused:
            return self._workers
        return frozenset(rank for rank in self._workers if self._paused.get(rank, number) >= number)

    def _enough(self) -> int:
        """How many contributions complete the next round."""
        within = frozenset(self._within(self.version + 1))
        if self._quorum is None:
            return len(within)
        return max(1, min(self._quorum, len(within - self._left)))
