"""How gradients are divided into messages that go while backward still runs, and which may go. Pure.

Backward gives the gradients of the last layers first, so a bucket is a run of parameters from the end, as in torch's
DistributedDataParallel. The division depends on sizes alone: every worker pushes the same lists of keys.
"""

from __future__ import annotations

from collections.abc import Sequence

FIRST_BYTES = 1 << 20  # the first bucket is small, so that the first bytes leave early
BUCKET_BYTES = 8 << 20  # large enough that a message's own cost does not count


def divide(sizes: Sequence[int], small: bool = False) -> list[range]:
    """Return the positions of parameters by bucket, in the order in which backward completes them.

    Args:
        sizes: of each parameter in bytes, in the order of registration. A bucket is full when it has reached its
            size, so one that is larger than a bucket is not divided.
        small: make all buckets as small as the first.
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
    """How far one step's gradients have come. A bucket goes when all of its gradients, and those before it, are there.

    Args:
        buckets: what ``divide`` has made.
    """

    def __init__(self, buckets: Sequence[range]) -> None:
        self._buckets = list(buckets)
        self._bucket_of = {position: number for number, bucket in enumerate(buckets) for position in bucket}
        self.restart()

    def restart(self) -> None:
        """Begin a new step."""
        self._missing = [set(bucket) for bucket in self._buckets]
        self._gone = 0

    def arrive(self, position: int) -> list[range]:
        """Note a gradient; return the buckets that go now."""
        self._missing[self._bucket_of[position]].discard(position)
        before = self._gone
        while self._gone < len(self._buckets) and not self._missing[self._gone]:
            self._gone += 1
        return self._buckets[before : self._gone]

    def gone(self, position: int) -> bool:
        """Whether the gradient at ``position`` has gone with its bucket."""
        return self._bucket_of[position] < self._gone

    @property
    def complete(self) -> bool:
        """Whether every bucket has gone."""
        return self._gone == len(self._buckets)
