"""Targets of contributions: segments with one set of rounds, and the requests that wait for them. No I/O, no clock.

A ``Bucket`` holds arrays that are pushed whole, a ``RowTarget`` the stripe of a table.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar
from weakref import ref

import torch

from kvstore import wire
from kvstore.cached import cached
from kvstore.errors import UsageError
from kvstore.spec import ITEMSIZE, Key, Spec, sum_dtype
from kvstore.transport.memory import Memory
from kvstore.values import PayloadRange, copy_each, from_buffer, ranges_of, sum_ranges, summed_in
from servers.names import workers
from servers.store.hyperparameters import Contributed, UpdateHyperparameters
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


MANY = 64  # so many messages that refer to a value are noted before those that are gone are forgotten


@dataclass(slots=True)
class Contribution(Contributed):
    """A contribution to a bucket; its ``ranges`` have all elements, with their values."""

    ranks: Sequence[int]
    clock: int
    ranges: Sequence[PayloadRange]
    hyper: UpdateHyperparameters


Progress: TypeAlias = Rounds[Contribution] | WorkerClocks[Contribution]


class Bucket(Target[Contribution]):
    """Segments of one dtype, back to back in memory that changes only while no message refers to it.

    A list of a thousand keys costs one sum, one step of the optimizer and one buffer of the reply, as long as workers
    push the list as a whole. When one of them pushes another list, ``Buckets`` splits the bucket.

    Attributes:
        value: all elements, flat.
        state: another object whenever the value has changed.
        changes: how often it has changed.
        read_by: by rank, the value that a worker has read last, where delay compensation needs it.
    """

    value: torch.Tensor
    _buffer: memoryview
    _own: bool  # whether the memory is this bucket's alone

    def __init__(self, segments: HeldSegments, dtype: str, rounds: Progress, memory: Memory) -> None:
        super().__init__(segments, rounds)
        self.dtype = dtype
        self.sizes = [spec.size for spec in segments.specs]
        self.starts = list(itertools.accumulate(self.sizes, initial=0))
        self.size = self.starts.pop()
        self.read_by: dict[int, torch.Tensor] = {}
        self._memory = memory
        self.state = object()
        self.changes = 0
        self._sent = False
        self._messages: list[ref[object]] = []
        self._prune_at = MANY
        self._move()

    @property
    def version(self) -> int:
        """How many rounds are over; where each push is an update, how often the value has changed."""
        return self.rounds.version if isinstance(self.rounds, Rounds) else self.changes

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [spec.shape for spec in self.segments.specs]

    @property
    def sum_bytes(self) -> int:
        return self.size * ITEMSIZE[sum_dtype(self.dtype)]

    def load(self, ranges: Sequence[PayloadRange]) -> None:
        sum_ranges([ranges], self.value)

    def adopt(self, buffer: wire.Buffer) -> None:
        """Make ``buffer`` the value, without a copy.

        It may be another process's memory, so nothing is written into it.
        """
        for part in ranges_of([buffer], self.dtype, self.size):
            self.value, self._buffer, self._own = part.values, memoryview(buffer).cast("B"), False
        self._changed()

    def assign(
        self,
        payloads: Sequence[Sequence[PayloadRange]],
        scale: float = 1.0,
        check: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """Make the sum of ``payloads``, times ``scale``, the value. If ``check`` raises, the value stays as it was."""
        # With a check the sum goes elsewhere, for the value before it must still be there if the check fails.
        before = self._buffer, self.value, self._own
        if check is not None or self._read:
            self._move()
        wide = summed_in(self.value.dtype)
        total = self.value if self.value.dtype == wide else torch.empty(self.size, dtype=wide, device="cpu")
        sum_ranges(payloads, total)
        if scale != 1 and total.is_floating_point():  # before half precision is rounded, so that it is rounded once
            total.mul_(scale)
        if total is not self.value:
            self.value.copy_(total)
        if check is not None:
            try:
                check(self.value)
            except BaseException:
                self._buffer, self.value, self._own = before
                raise
        self._changed()

    def writable(self) -> None:
        """Prepare the value for changes in place: if a message may still refer to its memory, move it."""
        if self._read:
            before = self.value
            self._move()
            copy_each([self.value], [before])
        self._changed()

    def readable(self, start: int, stop: int) -> memoryview:
        """Return the bytes of elements ``start`` to ``stop``, to be sent; they do not change."""
        self._sent = True
        itemsize = ITEMSIZE[self.dtype]
        return self._buffer[start * itemsize : stop * itemsize]

    def lend(self, message: object) -> None:
        """Keep the memory of the current value unchanged while ``message`` exists."""
        if len(self._messages) >= self._prune_at:
            self._messages = [other for other in self._messages if other() is not None]
            self._prune_at = MANY + 2 * len(self._messages)  # thousands that stay must not be looked at each time
        self._messages.append(ref(message))

    def whole(self) -> memoryview:
        """Return the bytes of all elements. They do not change while the returned view exists."""
        buffer = self.readable(0, self.size)
        self.lend(buffer)
        return buffer

    def remember(self, rank: int) -> None:
        """Keep the value that worker ``rank`` reads now."""
        kept = self.read_by.get(rank)
        if kept is None:
            self.read_by[rank] = self.value.clone()
        else:
            kept.copy_(self.value)

    @property
    def _read(self) -> bool:
        """Whether the memory must not be written: it is adopted, or a message that exists or is being read has it."""
        if not self._own:
            return True
        if not self._sent:
            return False
        # Two holders: the ledger keeps the message for repeats, in this process; a peer reads shared memory meanwhile.
        return any(message() is not None for message in self._messages) or self._memory.busy(self._buffer)

    def _changed(self) -> None:
        """Note that the value has changed: no message refers to its memory any more."""
        self._sent = False
        self._messages.clear()
        self._prune_at = MANY
        self.state = object()
        self.changes += 1

    def _move(self) -> None:
        self._buffer = self._memory.allocate(self.size * ITEMSIZE[self.dtype])
        self.value = from_buffer(self._buffer, self.dtype)
        self._own = True
