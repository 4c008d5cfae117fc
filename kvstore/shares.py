"""Samples shared out while they are used: whoever is ready takes the next ones of an epoch. Pure.

What a worker has taken and not used when it dies is given to others. So each sample of an epoch is used once, whichever
workers come and go, but for those of the step in which a worker died.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvstore.errors import Mismatch

KEPT = 2  # epochs of each data set: workers are in one of them, or have just left it


class Share(NamedTuple):
    """Samples ``start`` to ``stop`` of an epoch's order, none if these are equal; whether the epoch is over."""

    start: int
    stop: int
    over: bool = False


class _Epoch:
    """One epoch of one data set."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._next = 0
        self._returned: list[range] = []  # of workers that are lost, in order
        self._held: dict[int, deque[range]] = {}  # by rank: taken, and not used as far as is known; the oldest first
        self._used: dict[int, int] = {}  # by rank: how many of the samples that it has taken it has used
        self._verdicts: dict[int, bool] = {}  # by pass

    def take(self, rank: int, most: int) -> Share:
        if self._returned:
            first = self._returned.pop(0)
            if len(first) > most:
                self._returned.insert(0, first[most:])
            given = first[:most]
        else:
            given = range(self._next, min(self._next + most, self.size))
            self._next = given.stop
        if given:
            self._held.setdefault(rank, deque()).append(given)
        return Share(given.start, given.stop)

    def use(self, rank: int, used: int) -> None:
        """Note that ``rank`` has used so many samples of those that it has taken."""
        held, new = self._held.get(rank), used - self._used.get(rank, 0)
        self._used[rank] = max(used, self._used.get(rank, 0))
        while held and new > 0:
            first = held.popleft()
            if len(first) > new:
                held.appendleft(first[new:])
            new -= len(first)

    def use_all(self, rank: int) -> None:
        self._held.pop(rank, None)

    def lose(self, rank: int) -> None:
        self._used.pop(rank, None)
        self._returned = sorted([*self._returned, *self._held.pop(rank, ())], key=lambda part: part.start)

    def is_over(self, passes: int) -> bool:
        """Return whether nothing is left after so many passes. All workers get the answer that the first one got."""
        return self._verdicts.setdefault(passes, self._next == self.size and not self._returned)


class Shares:
    """The epochs of all data sets, by name."""

    def __init__(self) -> None:
        self._epochs: dict[str, dict[int, _Epoch]] = {}  # by name, then by number

    def take(self, rank: int, data: str, epoch: int, size: int, most: int, used: int, passes: int) -> Share:
        """Give worker ``rank`` up to ``most`` of the ``size`` samples of an epoch.

        Args:
            most: 0 asks whether the epoch is over after so many ``passes``. All that ``rank`` has taken is used then.
            used: how many samples of the epoch ``rank`` has used, of all that it has taken.

        Raises:
            Mismatch: another worker has said another size.
        """
        epochs = self._epochs.setdefault(data, {})
        latest = max(epochs, default=epoch)
        if epoch not in epochs and epoch < latest:
            return Share(0, 0, True)
        for number, other in epochs.items():
            if number < epoch:
                other.use_all(rank)
        current = epochs.setdefault(epoch, _Epoch(size))
        for number in sorted(epochs)[:-KEPT]:
            del epochs[number]
        if current.size != size:
            raise Mismatch(f"data set {data!r} has {size} samples on worker {rank}, and {current.size} on another")
        if not most:
            current.use_all(rank)
            return Share(0, 0, current.is_over(passes))
        current.use(rank, used)
        return current.take(rank, most)

    def lose(self, rank: int) -> None:
        """Give what worker ``rank``, which is lost, has not used to others."""
        for epochs in self._epochs.values():
            for epoch in epochs.values():
                epoch.lose(rank)
