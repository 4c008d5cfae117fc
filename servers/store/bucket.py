"""Segments that workers push together: one stretch of memory, one set of rounds, and the requests that wait for them.

A list of a thousand keys is one sum, one step of the optimizer and one buffer in the answer, as long as workers push
the list as a whole. When one of them pushes another list, buckets are split; see ``Buckets``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from kvstore.cached import cached
from kvstore.spec import ITEMSIZE, Key, Spec
from kvstore.transport.memory import Memory
from kvstore.values import PayloadRange, copy_each, from_buffer, sum_ranges
from kvstore.wire import Node, Pull, Push
from servers.store.clocks import WorkerClocks
from servers.store.hyperparameters import UpdateHyperparameters
from servers.store.rounds import Rounds


@dataclass
class Contribution:
    """A worker's part of a round: its values, and the hyper-parameters it wants them used with.

    ``clock`` says which of the worker's pushes it is.
    """

    node: Node
    clock: int
    runs: Sequence[PayloadRange]
    hyper: UpdateHyperparameters


@dataclass
class ParkedRequest:
    """A push or pull that waits: for how many buckets still, and the first error among those that have come.

    ``late`` of its segments came when their round was over.
    """

    peer: bytes
    request: Push | Pull
    late: int = 0
    left: int = 0
    error: Exception | None = None


class HeldSegment(NamedTuple):
    """A segment; ``splits`` is how often it has been taken out of a bucket."""

    id: int
    key: Key
    spec: Spec
    splits: int = 0


class HeldSegments(NamedTuple):
    """Segments, in columns: of thousands, nothing is made for each. See ``HeldSegment``."""

    ids: Sequence[int]
    keys: Sequence[Key]
    specs: Sequence[Spec]
    splits: Sequence[int]

    def segment(self, place: int) -> HeldSegment:
        """Return one of them."""
        return HeldSegment(self.ids[place], self.keys[place], self.specs[place], self.splits[place])


Progress: TypeAlias = Rounds[Contribution] | WorkerClocks[Contribution]


class Bucket:
    """Segments of one dtype, back to back in memory that is changed only while nobody else can read it.

    Args:
        segments: the segments, in order.
        dtype: theirs.
        rounds: who has contributed what to them.
        memory: where values live.

    Attributes:
        value: all elements, flat.
    """

    value: torch.Tensor
    _buffer: memoryview

    def __init__(self, segments: HeldSegments, dtype: str, rounds: Progress, memory: Memory) -> None:
        self.segments = segments
        self.ids = tuple(segments.ids)
        self.dtype = dtype
        self.sizes = [spec.size for spec in segments.specs]
        self.starts = list(itertools.accumulate(self.sizes, initial=0))
        self.size = self.starts.pop()
        self.rounds = rounds
        self.read_by: dict[int, torch.Tensor] = {}  # the values that workers have, where that matters
        self.parked: list[tuple[int, ParkedRequest]] = []
        self._memory = memory
        self.state = object()  # another one whenever the value has changed
        self._sent = False
        self._move()

    @cached
    def places(self) -> dict[int, int]:
        """By segment, which of them it is."""
        return {number: place for place, number in enumerate(self.ids)}

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of the segments."""
        return [spec.shape for spec in self.segments.specs]

    @property
    def idle(self) -> bool:
        """Whether no round is open and nobody waits."""
        return self.rounds.idle and not self.parked

    def load(self, runs: Sequence[PayloadRange]) -> None:
        """Take first values."""
        sum_ranges([runs], self.value)

    def assign(
        self,
        payloads: Sequence[Sequence[PayloadRange]],
        scale: float = 1.0,
        check: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """Make the sum of ``payloads`` the value, times ``scale`` if it is of floating point.

        Args:
            check: raises if the sum must not become the value, which then stays as it is.
        """
        before = self._buffer, self.value
        if check is not None or self._read:
            self._move()
        sum_ranges(payloads, self.value)
        if scale != 1 and self.value.is_floating_point():
            self.value.mul_(scale)
        if check is not None:
            try:
                check(self.value)
            except BaseException:
                self._buffer, self.value = before
                raise
        self._sent = False
        self.state = object()

    def writable(self) -> None:
        """Make the value such that it may be changed in place: what has been sent stays as it was."""
        if self._read:
            before = self.value
            self._move()
            copy_each([self.value], [before])
        self._sent = False
        self.state = object()

    def readable(self, start: int, stop: int) -> memoryview:
        """Return the bytes of elements ``start`` to ``stop``, to be sent; they will not change."""
        self._sent = True
        itemsize = ITEMSIZE[self.dtype]
        return self._buffer[start * itemsize : stop * itemsize]

    def release(self, error: Exception | None) -> list[ParkedRequest]:
        """Let go those who waited for the round that is now complete; return the ones that wait for nothing more."""
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

    def remember(self, rank: int) -> None:
        """Keep the value as what worker ``rank`` has read."""
        kept = self.read_by.get(rank)
        if kept is None:
            self.read_by[rank] = self.value.clone()
        else:
            kept.copy_(self.value)

    @property
    def _read(self) -> bool:
        """Whether somebody may still read what was sent of the memory."""
        return self._sent and self._memory.busy(self._buffer)

    def _move(self) -> None:
        """Take other memory."""
        self._buffer = self._memory.allocate(self.size * ITEMSIZE[self.dtype])
        self.value = from_buffer(self._buffer, self.dtype)
