"""Buckets: which gradients share a message that is sent during backward, and which buckets are complete. Pure.

Backward makes the gradients of the last layers first, so buckets are ranges of parameters from the end, as in torch's
DistributedDataParallel. The division depends on sizes alone, so every worker pushes the same lists of keys.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

# torch's DistributedDataParallel has 1 MiB and 25 MiB.
FIRST_BYTES = 1 << 20  # small, so that the first bytes leave early
BUCKET_BYTES = 8 << 20  # large, so that the cost of a message does not matter


def divide(sizes: Sequence[int], small: bool = False) -> list[range]:
    """Return the positions of parameters by bucket, in the order in which backward completes them.

    A bucket is full when it has reached its size. A parameter larger than a bucket is not divided.
    """
    buckets: list[range] = []
    stop, held = len(sizes), 0
    for position in reversed(range(len(sizes))):
        held += sizes[position]
        if position == 0 or held >= (BUCKET_BYTES if buckets and not small else FIRST_BYTES):
            buckets.append(range(position, stop))
            stop, held = position, 0
    return buckets


class Progress:
    """The progress of one step. A bucket is sent when its gradients, and all earlier buckets, are complete."""

    def __init__(self, buckets: Sequence[range], skipped: Collection[int] = ()) -> None:
        self._buckets = list(buckets)
        self._skipped = frozenset(skipped)
        self._bucket_of = {position: number for number, bucket in enumerate(buckets) for position in bucket}
        self.restart()

    @property
    def num_buckets(self) -> int:
        return len(self._buckets)

    def restart(self) -> None:
        self._missing = [set(bucket) - self._skipped for bucket in self._buckets]
        self._gone = 0

    def arrive(self, position: int) -> list[range]:
        """Note a gradient; return the buckets to send now."""
        self._missing[self._bucket_of[position]].discard(position)
        before = self._gone
        while self._gone < len(self._buckets) and not self._missing[self._gone]:
            self._gone += 1
        return self._buckets[before : self._gone]

    def gone(self, position: int) -> bool:
        return self._bucket_of[position] < self._gone

    @property
    def complete(self) -> bool:
        return self._gone == len(self._buckets)
