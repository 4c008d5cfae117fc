"""What contributions go to: segments with one set of rounds, and the requests that wait for these. No I/O, no clock.

A ``Bucket`` is such a target of values that are pushed whole, a ``RowTarget`` is the stripe of a table. Both count
rounds, and are waited for, alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from kvstore import wire
from kvstore.cached import cached
from kvstore.spec import Key, Spec
from servers.store.clocks import WorkerClocks
from servers.store.rounds import Rounds

FAILURES = 16  # of rounds that another server has closed; workers have fewer pushes of one key under way

Item = TypeVar("Item")
PushRequest: TypeAlias = wire.Push | wire.PushRows
WaitingRequest: TypeAlias = PushRequest | wire.Pull | wire.PullRows | wire.FreezeTable | wire.EvictRows


@dataclass(slots=True)
class ParkedRequest:
    """A request that waits for rounds.

    Attributes:
        peer: the link that it came over.
        request: the request.
        late: how many of its segments came after their round was over.
        left: how many targets it still waits for.
        error: the first error among the rounds that it has waited for.
        since: when it came.
    """

    peer: bytes
    request: WaitingRequest
    late: int = 0
    left: int = 0
    error: Exception | None = None
    since: float = 0.0


class HeldSegment(NamedTuple):
    """A segment that this server holds; ``splits`` is how often it has been taken out of a bucket."""

    id: int
    key: Key
    spec: Spec
    splits: int = 0


class HeldSegments(NamedTuple):
    """The columns of a list of segments, so that thousands of them need no object each. See ``HeldSegment``."""

    ids: Sequence[int]
    keys: Sequence[Key]
    specs: Sequence[Spec]
    splits: Sequence[int]

    def segment(self, place: int) -> HeldSegment:
        """Return the segment in row ``place``."""
        return HeldSegment(self.ids[place], self.keys[place], self.specs[place], self.splits[place])


class Target(Generic[Item]):
    """Segments that share rounds.

    Args:
        segments: in order.
        rounds: of the segments.

    Attributes:
        ids: of the segments.
        parked: the requests that wait for a round, with its number.
        failures: why the last rounds have failed that another server has closed, by number.
        judged, last_at: of ``ArrivalTimes``: the last version that it has seen, and when the last contribution to the
            next round came; where each push is an update, since when one worker alone is behind all others.
    """

    def __init__(self, segments: HeldSegments, rounds: Rounds[Item] | WorkerClocks[Item]) -> None:
        self.segments = segments
        self.ids = tuple(segments.ids)
        self.rounds = rounds
        self.parked: list[tuple[int, ParkedRequest]] = []
        self.failures: dict[int, Exception] = {}
        self.judged = rounds.version
        self.last_at: float | None = None

    @cached
    def places(self) -> dict[int, int]:
        """The place of each segment, by its id."""
        return {number: place for place, number in enumerate(self.ids)}

    @property
    def idle(self) -> bool:
        """Whether no round is open and no request waits."""
        return self.rounds.idle and not self.parked

    def release(self, error: Exception | None) -> list[ParkedRequest]:
        """Take the requests that waited for rounds that are over; return those that wait for no other target."""
        ready: list[ParkedRequest] = []
        waiting: list[tuple[int, ParkedRequest]] = []
        for clock, parked in self.parked:
            if clock > self.rounds.version:
                waiting.append((clock, parked))
                continue
            parked.left -= 1
            parked.error = parked.error or error
            if not parked.left:
                ready.append(parked)
        self.parked = waiting
        return ready

    def fail(self, version: int, error: Exception) -> None:
        """Note why round ``version`` has failed, for pushes that will be repeated."""
        self.failures[version] = error
        for old in sorted(self.failures)[:-FAILURES]:
            del self.failures[old]


AnyTarget: TypeAlias = Target[Any]
