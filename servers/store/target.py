"""Targets of contributions: segments with one set of rounds, and the requests that wait for them. No I/O, no clock.

A ``Bucket`` (bucket.py) holds arrays that are pushed whole, a ``RowTarget`` (row_target.py) the stripe of a table.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from kvstore import wire
from kvstore.cached import cached
from kvstore.errors import UsageError
from kvstore.spec import Key, Spec
from servers.names import workers
from servers.store.rounds import Rounds, WorkerClocks

FAILURES = 16  # of rounds that another server has closed; workers have fewer pushes of one key in flight

Item = TypeVar("Item")
PushRequest: TypeAlias = wire.Push | wire.PushRows
WaitingRequest: TypeAlias = PushRequest | wire.Pull | wire.PullRows | wire.FreezeTable | wire.EvictRows


@dataclass(slots=True)
class ParkedRequest:
    """A request that waits for rounds."""

    peer: bytes
    request: WaitingRequest
    late: int = 0  # how many of its segments came after their round was over
    left: int = 0  # how many targets it still waits for
    error: Exception | None = None  # the first error among the rounds that it has waited for
    since: float = 0.0


class HeldSegment(NamedTuple):
    """A segment that this server holds; ``splits`` is how often it has been taken out of a bucket."""

    id: int
    key: Key
    spec: Spec
    splits: int = 0


class HeldSegments(NamedTuple):
    """The columns of a list of ``HeldSegment``, so that thousands of them need no object each."""

    ids: Sequence[int]
    keys: Sequence[Key]
    specs: Sequence[Spec]
    splits: Sequence[int]

    @classmethod
    def joined(cls, lists: Sequence[HeldSegments]) -> HeldSegments:
        """Return the segments of all ``lists``, one after the other."""
        if len(lists) == 1:
            return lists[0]
        return cls(*(list(itertools.chain(*parts)) for parts in zip(*lists, strict=True)))

    def segment(self, place: int) -> HeldSegment:
        return HeldSegment(self.ids[place], self.keys[place], self.specs[place], self.splits[place])


class Target(Generic[Item]):
    """Segments that share rounds."""

    def __init__(self, segments: HeldSegments, rounds: Rounds[Item] | WorkerClocks[Item]) -> None:
        self.segments = segments
        self.ids = tuple(segments.ids)
        self.rounds = rounds
        self.parked: list[tuple[int, ParkedRequest]] = []  # with the round that each waits for
        self.failures: dict[int, Exception] = {}  # why the last rounds failed that another server has closed
        # For ``ArrivalTimes``: the last version that it has seen, when the last contribution to the next round came.
        # Where each push is an update, it is since when one worker alone is behind all others.
        self.judged = rounds.version
        self.last_at: float | None = None

    @cached
    def places(self) -> dict[int, int]:
        return {number: place for place, number in enumerate(self.ids)}

    @property
    def idle(self) -> bool:
        return self.rounds.idle and not self.parked

    def require_open(self, ranks: Sequence[int], clock: int) -> None:
        """Raise ``UsageError`` unless push ``clock`` of ``ranks`` belongs to an open round, is late, or a repeat."""
        rounds = self.rounds
        if not (rounds.expects(ranks, clock) or rounds.is_late(ranks, clock) or rounds.counts(ranks, clock)):
            raise UsageError(
                f"push {clock} of {self.segments.keys[0]!r} by {workers(ranks)} belongs to no open round: "
                f"{rounds.version} rounds are over, and no push may come twice"
            )

    def release(self, error: Exception | None) -> list[ParkedRequest]:
        """Take the requests that waited for rounds that are over; return those that wait for no other target."""
        ready: list[ParkedRequest] = []
        waiting: list[tuple[int, ParkedRequest]] = []
        for clock, parked in self.parked:  # not by round: a target has a few requests, and most wait for this round
            if clock > self.rounds.version:
                waiting.append((clock, parked))
                continue
            parked.left -= 1
            parked.error = parked.error or error
            if not parked.left:
                ready.append(parked)
        self.parked = waiting
        return ready

    def fail_pushes(self, errors: Mapping[int, Exception]) -> None:
        """Fail the pushes of these workers, by rank, to the round that has just closed."""
        for clock, parked in self.parked:
            if clock == self.rounds.version and isinstance(parked.request, PushRequest):
                parked.error = parked.error or errors.get(parked.request.node.rank)

    def divide(self, parts: Sequence[Target[Any]], part_of: Callable[[Item, int], Any]) -> None:
        """Give ``parts``, which have this target's segments from now on, its rounds and the requests that wait.

        ``part_of`` returns the share of a contribution that belongs to the part at a place.
        """
        waiting = [(clock, parked, set(parked.request.ids)) for clock, parked in self.parked]
        contributed = self.rounds.open()
        for place, part in enumerate(parts):
            part.rounds = self.rounds.copy()
            for clock, ranks, item in contributed:
                part.rounds.contribute(ranks, clock, part_of(item, place))
            for clock, parked, wanted in waiting:
                if not wanted.isdisjoint(part.ids):
                    part.parked.append((clock, parked))
                    parked.left += 1
        # Only now, so that no request seems to wait for nothing in between.
        for _, parked, _ in waiting:
            parked.left -= 1

    def fail(self, version: int, error: Exception) -> None:
        """Keep the reason why round ``version`` failed, for pushes that will be repeated."""
        self.failures[version] = error
        for old in sorted(self.failures)[:-FAILURES]:
            del self.failures[old]


AnyTarget: TypeAlias = Target[Any]
