"""A bucket: arrays of one dtype that workers push whole, back to back in memory that messages refer to. No I/O."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias
from weakref import ref

import torch

from kvstore import wire
from kvstore.spec import ITEMSIZE, sum_dtype
from kvstore.transport.memory import Memory
from kvstore.values import PayloadRange, copy_each, from_buffer, ranges_of, sum_ranges, summed_in
from servers.store.hyperparameters import Contributed, UpdateHyperparameters
from servers.store.rounds import Rounds, WorkerClocks
from servers.store.target import HeldSegments, Target

MANY = 64  # so many messages that refer to a value are noted before those that are gone are forgotten


@dataclass(slots=True)
class Contribution(Contributed):
    """A contribution to a bucket; its ``ranges`` have all elements, with their values."""

    ranks: Sequence[int]
    clock: int
    ranges: Sequence[PayloadRange]
    hyper: UpdateHyperparameters
    weight: float | None = None  # of each worker's values in the mean of the round; None is 1


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
        # What is one payload's already is not rounded twice: so it goes in without the way through float32, which takes
        # ten times as long as the copy.
        plain = self.value.dtype == wide or (len(payloads) == 1 and scale == 1)
        total = self.value if plain else torch.empty(self.size, dtype=wide, device="cpu")
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
