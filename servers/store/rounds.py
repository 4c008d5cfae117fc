"""Rounds of one bucket and their contributions; without rounds, how often each worker has pushed. Pure.

Each worker's n-th push is its contribution to round n. A contribution may be the sum of several workers' pushes: it
counts for each of them. A round is complete when every worker has contributed, or as many as the quorum asks for.
Rounds are closed in order, whatever the order of contributions, and a round's contributions are in the order of their
first ranks, so that their sum has the same bits every time. A worker that pauses after its n-th push is in no later
round until all resume.

A standby knows the rounds that its primary has closed, but not the contributions to those that are open. When it takes
over, workers repeat what has not been answered: a push that has counted must not count again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from typing import Generic, TypeVar

T = TypeVar("T")
_RANK = itemgetter(0)
MOST_OVERTAKEN = 64  # pushes of one worker that are remembered as missing; refused ones stay missing
NOBODY: frozenset[int] = frozenset()  # one for all rounds: each key has some, and an empty set takes 216 bytes

# The states of round n, and the effect of a worker's push n in each. ``version`` is how many rounds are over.
#
#   state                          known by         a first push n                       a second push n of that worker
#   not begun                      n > version      opens the round                      -
#   open                           n in _open       is taken                             is none: the first one stays
#   over, closed here              n <= version     quorum: late; else it is refused     never comes: see the ledger
#   over, closed by another server n <= _followed   quorum: late if _counted lacks it;   has counted, and is answered
#   or before an aggregator died                    else it is a repeat
#   beyond the worker's pause      n > _paused      is refused in each state             is refused
#
# A worker that pauses names its last push; a worker that is lost cannot. What has come of it counts, and no round waits
# for more. It may die when some servers have their part of its push and others do not. Then the push counts only on the
# servers that have it. To prevent that, each server would have to wait in each round until all servers have everything.
#
# A worker that comes while the job runs begins after a clock that its sponsor names. The sponsor has pushed so often,
# and pushes no more until all servers know. So no server has closed a later round.
#
# The calls, by the process that makes them. A standby that takes over serves from then on.
#
#   a server that serves   expects, contribute, complete, pause, resume, leave, lose, admit, withdraw
#   a standby              follow: the next round alone, as each is recorded. reach: any later round, when it is handed
#                          results, which a quorum excludes: only the record of a round says who contributed. restore:
#                          before all else. contribute: late contributions alone. pause, resume, leave, lose,
#                          admit


class _OpenRound(Generic[T]):
    """The contributions to a round that is not over."""

    __slots__ = ("contributions", "ranks")

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.contributions: dict[int, tuple[Sequence[int], T]] = {}  # by the first rank of each, with all its ranks


class Rounds(Generic[T]):
    """The rounds of one bucket.

    Args:
        stands: for how many workers the sum of a round stands if some of them are not in it, or more are in; None for
            all ``workers``.

    Attributes:
        version: how many rounds are over.
        share: how many workers the last round was of.
        contributors: with a quorum, the ranks that contributed to the last round.
    """

    def __init__(
        self,
        workers: Collection[int],
        version: int = 0,
        quorum: int | None = None,
        keep: bool = False,
        stands: int | None = None,
    ) -> None:
        self.version = version
        self._workers = frozenset(workers)
        self._number = len(self._workers)
        self._stands = self._number if stands is None else stands
        # Most often all from 0 on; then one comparison tells whether ranks are workers, not thousands of look-ups.
        self._dense = not self._workers or (min(self._workers), max(self._workers)) == (0, self._number - 1)
        self._quorum = quorum
        self._keep = keep
        self.share: float = self._stands
        self._left = NOBODY
        self._lost = NOBODY
        self._paused: dict[int, int] = {}  # by rank: the last round it is in
        self._coming: dict[int, int] = {}  # by rank: the last round it is not in
        self._absent = NOBODY  # the workers that are not in the next round, so that ``_enough`` costs no loop
        self._gone = NOBODY  # those of them that are lost or come later: what they have contributed completes no round
        self._open: dict[int, _OpenRound[T]] = {}
        self._late: list[tuple[int, Sequence[int], T]] = []
        self.contributors: Collection[int] = ()
        self._counted: dict[int, int] = {}  # with a quorum, by rank: its last push that counts
        self._followed = 0  # pushes up to this round may come again: another server has closed it, say

    @property
    def untouched(self) -> bool:
        return not self.version and self.idle

    @property
    def idle(self) -> bool:
        return not self._open and not self._late

    @property
    def one_behind(self) -> bool:
        """Always False: ``contributions`` say whom a round waits for; compare ``WorkerClocks``."""
        return False

    @property
    def state(self) -> tuple[int, int, dict[int, int], dict[int, int], dict[int, int]]:
        """What must be equal for two idle buckets to be merged."""
        return self.version, self._followed, self._counted, self._paused, self._coming

    @property
    def partial(self) -> bool:
        """Whether a round may be of fewer or more workers than it stands for, but for those that pause."""
        return self._quorum is not None or bool(self._lost or self._coming) or self._stands != self._number

    @property
    def clocks(self) -> Mapping[int, int]:
        """With a quorum, by rank, the last push that counts; else empty."""
        return self._counted

    @property
    def kept(self) -> Sequence[tuple[int, Sequence[int], T]]:
        """The contributions that came late and count in the next round: (clock, ranks, contribution)."""
        return self._late

    @property
    def settled(self) -> bool:
        """Whether the rounds up to the last push of every worker that pauses are over; True if not all pause."""
        living = [last for rank, last in self._paused.items() if rank not in self._lost]
        return len(living) + len(self._lost) < self._number or self.version >= max(living, default=0)

    def copy(self) -> Rounds[T]:
        made: Rounds[T] = Rounds(self._workers, self.version, self._quorum, self._keep, self._stands)
        made._paused, made._coming = dict(self._paused), dict(self._coming)
        made._left, made._lost = self._left, self._lost
        made._counted = dict(self._counted)
        made._followed = self._followed
        made._look()
        return made

    def open(self) -> list[tuple[int, Sequence[int], T]]:
        """Return the contributions that belong to no closed round: (clock, ranks, contribution)."""
        return [
            (clock, ranks, contribution)
            for clock, round_ in self._open.items()
            for ranks, contribution in round_.contributions.values()
        ] + self._late

    def expects(self, ranks: Sequence[int], clock: int) -> bool:
        """Return whether round ``clock`` is not over, and all ``ranks`` are in it, of which none has contributed."""
        round_ = self._open.get(clock)
        return (
            self.version < clock
            and self._has(ranks)
            and not (self._paused and self._beyond(ranks, clock))
            and (round_ is None or round_.ranks.isdisjoint(ranks))
        )

    def counts(self, ranks: Sequence[int], clock: int) -> bool:
        """Return whether push ``clock`` of ``ranks`` is a repeat: another server has counted it in a closed round."""
        # A new primary knows closed rounds from records, but not whose pushes were in them. Workers resend all that has
        # no answer yet. Without a quorum a round had the pushes of all; with one, the record says who contributed.
        if clock > self._followed:
            return False
        return self._quorum is None or all(clock <= self._counted.get(rank, 0) for rank in ranks)

    def is_late(self, ranks: Sequence[int], clock: int) -> bool:
        """Return whether a quorum has closed round ``clock`` without push ``clock`` of ``ranks``."""
        return self._quorum is not None and clock <= self.version and not self.counts(ranks, clock)

    def contribute(self, ranks: Sequence[int], clock: int, contribution: T) -> bool:
        """Take the contribution of ``ranks``, which rise, to round ``clock``; return whether it counts there."""
        if not self._has(ranks) or (self._paused and self._beyond(ranks, clock)):
            return False
        if clock <= self.version:
            if self._keep and self._quorum is not None:
                self._late.append((clock, ranks, contribution))
                self._count(ranks, clock)
            return False
        round_ = self._open.get(clock)
        if round_ is None:
            round_ = self._open[clock] = _OpenRound()
        elif not round_.ranks.isdisjoint(ranks):
            return False
        round_.ranks.update(ranks)
        round_.contributions[ranks[0]] = ranks, contribution
        return True

    def complete(self) -> list[T] | None:
        """Close the next round if it is complete; return its contributions by first ranks, late ones last."""
        round_ = self._open.get(self.version + 1)
        if round_ is None or not self._is_complete(round_):
            return None
        self.version += 1
        if self._quorum is not None:
            self.contributors = sorted(round_.ranks)
            self._count(round_.ranks, self.version)
        self.share = self._stands
        if self._paused or self._coming:
            paused, number = sum(last < self.version for last in self._paused.values()), len(round_.ranks)
            # Those that have run out of batches add nothing, so that the others' count as before.
            if number + paused > self._stands:
                self.share *= number / (number + paused)
            else:
                self.share -= paused
            self._look()
        del self._open[self.version]
        contributions = [each for _, (_, each) in sorted(round_.contributions.items(), key=_RANK)]
        if self._late:
            contributions += [each for _, _, each in sorted(self._late, key=lambda entry: (entry[0], entry[1][0]))]
            self._late.clear()
        return contributions

    def factor(self, contributors: float, weighed: bool = False) -> float:
        """Return the factor for the sum of the last round, to which so many workers have contributed.

        With a quorum, and without workers that are lost, it is as if each worker of the round had contributed. It is so
        if the sum is ``weighed``, too: then ``contributors`` is the sum of their weights.
        """
        return self.share / contributors if weighed or self.partial else 1.0

    def awaited(self) -> Collection[int] | None:
        """Return whom the next round lacks, which is complete without them; None if it is not complete."""
        round_ = self._open.get(self.version + 1)
        if round_ is None or not self._is_complete(round_):
            return None
        return self._workers.difference(round_.ranks, self._absent)

    def follow(self, version: int, contributors: Collection[int] = ()) -> None:
        """Close the next round, which is ``version``, as another server has."""
        if version != self.version + 1:
            raise ValueError(f"round {version} was closed after round {self.version}")
        self.reach(version)
        self._count(contributors, version)
        self._late.clear()

    def reach(self, version: int) -> None:
        """Close all rounds up to ``version``, as another server has; without a quorum that is all."""
        if version < self.version:
            raise ValueError(f"round {version} was closed after round {self.version}")
        self.version = self._followed = version
        if self._paused or self._coming:
            self._look()

    def pass_to(self, clock: int) -> None:
        """Be at ``clock`` at least, where everybody goes on from a join: nobody is in the rounds up to there."""
        self.version = max(clock, self.version)
        self._open = {number: round_ for number, round_ in self._open.items() if number > self.version}
        self._look()

    def restore(self, version: int, clocks: Mapping[int, int]) -> None:
        """Be at ``version``, as another server is, whose ``clocks`` these are."""
        self.version = self._followed = version
        self._counted = dict(clocks)

    def missing(self, clock: int) -> dict[int, int]:
        """Return which workers round ``clock`` waits for: by rank, the first round that lacks its contribution."""
        missing: dict[int, int] = {}
        others, number = self._workers - self._left - self._lost, self.version + 1
        while others and number <= clock:
            lacking = others.difference(self._open[number].ranks if number in self._open else ())
            if self._coming:  # one that is in later rounds only may lack one of those
                lacking = lacking.difference(rank for rank, last in self._coming.items() if number <= last)
            missing.update((rank, number) for rank in lacking if number <= self._paused.get(rank, number))
            others, number = others - lacking, number + 1
        return missing

    def leave(self, ranks: Collection[int]) -> None:
        """Note which workers have left. Only with a quorum do rounds go on without them."""
        if self._quorum is not None:
            self._left = self._workers.intersection(ranks) or NOBODY
            self._look()

    def lose(self, ranks: Collection[int]) -> None:
        """Note which workers are lost. Rounds go on without them, and what has come of them counts."""
        # One that had paused stays so until all resume: it had run out of batches, and others do not stand for it.
        self._lost = self._workers.intersection(ranks) or NOBODY
        self._look()

    def admit(self, rank: int, clock: int) -> None:
        """Let ``rank``, which was lost, be in the rounds after ``clock``, which no server has passed."""
        if rank in self._workers:
            self._lost = self._lost - {rank} or NOBODY
            self._paused.pop(rank, None)
            self._coming[rank] = clock
            for number, round_ in self._open.items():  # what the process before it had pushed ahead, it pushes now
                if number > clock and tuple(round_.contributions.get(rank, ((),))[0]) == (rank,):
                    del round_.contributions[rank]
                    round_.ranks.discard(rank)
            if self._quorum is not None:  # its pushes up to there are those of the process before it
                self._counted[rank] = max(clock, self._counted.get(rank, 0))
            self._look()

    def withdraw(self, ranks: Collection[int], back: Collection[int]) -> None:
        """Forget what one process has contributed for ``ranks`` to rounds that are open: each of them repeats its part.

        A contribution of one of ``back`` alone is its own. Pushes to rounds that are over may come again, too.
        """
        for round_ in self._open.values():
            for first, (theirs, _) in list(round_.contributions.items()):
                if set(theirs).issubset(ranks) and not (len(theirs) == 1 and first in back):
                    del round_.contributions[first]
                    round_.ranks.difference_update(theirs)
        self._followed = self.version

    def omit(self, ranks: Collection[int]) -> None:
        """Treat these workers, which were started again, as absent from the last round."""
        self._coming.update(dict.fromkeys(ranks, self.version))

    def pause(self, rank: int, clock: int) -> None:
        """Take ``rank`` out of the rounds after ``clock``."""
        if rank in self._workers:
            self._paused[rank] = clock
            if clock <= self.version:
                self._absent |= {rank}

    def resume(self) -> None:
        """Let everybody be in the next round again."""
        self._paused.clear()
        self._look()

    def _has(self, ranks: Sequence[int]) -> bool:
        if self._dense:
            return ranks[0] >= 0 and ranks[-1] < self._number
        return self._workers.issuperset(ranks)

    def _count(self, ranks: Collection[int], clock: int) -> None:
        for rank in ranks:
            self._counted[rank] = max(clock, self._counted.get(rank, 0))

    def _beyond(self, ranks: Sequence[int], clock: int) -> bool:
        return any(clock > self._paused.get(rank, clock) for rank in ranks)

    def _is_complete(self, round_: _OpenRound[T]) -> bool:
        return len(round_.ranks) - len(self._gone & round_.ranks) >= self._enough()

    def _enough(self) -> int:
        """Return how many contributions of workers that are not lost complete the next round."""
        # At least one: while all others pause, a round that has only pushes of lost workers stays open. The others join
        # that round when they go on. If it closed here, servers without these pushes would be a round behind this one.
        within = self._number - len(self._absent)
        return max(1, within if self._quorum is None else min(self._quorum, within))

    def _look(self) -> None:
        """Find the workers that are not in the next round: they pause before it, come after it, have left, are lost."""
        # An entry stays until the newcomer's first round is over. ``partial`` is asked when a round has been closed,
        # and must still know then that the newcomer was not in it.
        self._coming = {rank: last for rank, last in self._coming.items() if last >= self.version}
        paused = (rank for rank, last in self._paused.items() if last <= self.version)
        self._gone = self._lost.union(rank for rank, last in self._coming.items() if last > self.version) or NOBODY
        self._absent = self._left.union(self._gone, paused) or NOBODY


class WorkerClocks(Generic[T]):
    """How often each worker has pushed one bucket, where every push is an update of its own.

    It has the interface of ``Rounds``. Its ``version`` is how often the slowest worker has pushed, so a read by
    a worker that is too far ahead waits for a version, as one in rounds does. A worker that pauses is not counted until
    all resume, at the highest clock.
    """

    idle = True
    settled = True
    partial = False
    version: int

    def __init__(self, workers: Collection[int], clocks: dict[int, int] | None = None) -> None:
        self._clocks = dict.fromkeys(sorted(workers), 0) if clocks is None else clocks
        self._paused: dict[int, int] = {}
        self._overtaken: dict[int, set[int]] = {}  # by rank: the pushes that are missing before its last one
        self._look()

    @property
    def untouched(self) -> bool:
        return not any(self._clocks.values()) and not self._paused

    @property
    def one_behind(self) -> bool:
        return self._counts[self.version] == 1 and len(self._clocks) > 1

    @property
    def state(self) -> tuple[dict[int, int], dict[int, int], dict[int, set[int]]]:
        return self._clocks, self._paused, self._overtaken

    @property
    def clocks(self) -> Mapping[int, int]:
        """By rank, how often each worker has pushed, including those that pause."""
        return self._clocks | self._paused

    def restore(self, version: int, clocks: Mapping[int, int]) -> None:
        """Be where another server is. The version follows from ``clocks``; nobody pauses."""
        self._clocks, self._paused = dict(sorted(clocks.items())), {}
        self._look()

    def copy(self) -> WorkerClocks[T]:
        made: WorkerClocks[T] = WorkerClocks((), dict(self._clocks))
        made._paused = dict(self._paused)
        made._overtaken = {rank: set(clocks) for rank, clocks in self._overtaken.items()}
        made._look()
        return made

    def made(self, rank: int) -> tuple[int, frozenset[int]]:
        """Return the last push of ``rank``, and which before it have not come: later ones have overtaken them."""
        return self.clocks.get(rank, 0), frozenset(self._overtaken.get(rank, ()))

    def open(self) -> list[tuple[int, Sequence[int], T]]:
        return []

    def expects(self, ranks: Sequence[int], clock: int) -> bool:
        """Return True: a push that a later one of ``ranks`` has overtaken is an update, too."""
        return True

    def counts(self, ranks: Sequence[int], clock: int) -> bool:
        """Return False: here the ledger knows which pushes are repeats."""
        return False

    def is_late(self, ranks: Sequence[int], clock: int) -> bool:
        return False

    def contribute(self, ranks: Sequence[int], clock: int, contribution: T) -> bool:
        """Note that each of ``ranks`` has pushed ``clock`` times; return whether that is news of one of them."""
        behind = [rank for rank in ranks if self._clocks.get(rank, clock) < clock]
        if self._overtaken:
            for rank in ranks:
                self._overtaken.get(rank, set()).discard(clock)
        if not behind:
            return False
        self._counts[clock] += len(behind)
        for rank in behind:
            if clock > self._clocks[rank] + 1:
                overtaken = {*self._overtaken.get(rank, ()), *range(self._clocks[rank] + 1, clock)}
                self._overtaken[rank] = set(sorted(overtaken)[-MOST_OVERTAKEN:])
            self._counts[self._clocks[rank]] -= 1
            if not self._counts[self._clocks[rank]]:
                del self._counts[self._clocks[rank]]
            self._clocks[rank] = clock
        if self.version not in self._counts:
            self.version = min(self._counts)
        return True

    def awaited(self) -> None:
        return None

    def complete(self) -> list[T] | None:
        return None

    def factor(self, contributors: float, weighed: bool = False) -> float:
        return 1.0

    def lose(self, ranks: Collection[int]) -> None:
        """Go on without workers that are lost, as without those that have left."""
        self.leave(ranks)

    def admit(self, rank: int, clock: int) -> None:
        """Count ``rank``, which was lost, as if it had pushed ``clock`` times. May be repeated."""
        self._clocks = dict(sorted({**self._clocks, rank: max(clock, self._clocks.get(rank, 0))}.items()))
        self._look()

    def pass_to(self, clock: int) -> None:
        """Do nothing: here no round waits for anybody."""

    def missing(self, clock: int) -> dict[int, int]:
        """Return the workers that have pushed less often than ``clock``: by rank, the first push that is missing."""
        return {rank: pushed + 1 for rank, pushed in self._clocks.items() if pushed < clock}

    def leave(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            self._clocks.pop(rank, None)
            self._paused.pop(rank, None)
        self._look()

    def withdraw(self, ranks: Collection[int], back: Collection[int]) -> None:
        """Do nothing: here no contribution waits for others."""

    def omit(self, ranks: Collection[int]) -> None:
        """Do nothing: here no round is over."""

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
