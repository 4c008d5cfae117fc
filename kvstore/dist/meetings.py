"""The meetings of a job's workers, where all hear what worker 0 has decided."""

from __future__ import annotations

from typing import Any, Protocol

import torch

KEY = "checkpoint"


class MeetingStore(Protocol):
    """A synchronous store of the job's, for sums of a few numbers."""

    def init(self, key: Any, value: Any) -> None:
        """See ``KVStore``."""
        ...

    def pull(self, key: Any, out: Any) -> Any:
        """See ``KVStore``."""
        ...

    def pushpull(self, key: Any, value: Any) -> Any:
        """See ``KVStore``."""
        ...

    def join(self, timeout: float | None = None) -> int:
        """See ``KVStore``."""
        ...

    def begin_join(self) -> None:
        """Begin ``join``, which another call ends."""
        ...

    def close(self) -> None:
        """See ``KVStore``."""
        ...


def told(store: MeetingStore, number: int, resumed: int) -> tuple[int, int]:
    """Return what worker 0 gives: the number of the newest checkpoint, and that of the one to continue from."""
    numbers = torch.tensor([number, resumed], dtype=torch.int64, device="cpu")
    store.init(KEY, numbers)
    store.pull(KEY, numbers)
    return int(numbers[0]), int(numbers[1])


class Meetings:
    """See the module. Each is a sum over all workers.

    Args:
        store: for the sums.
        rank, num_workers: this worker's rank, and how many there are.
    """

    def __init__(self, store: MeetingStore, rank: int, num_workers: int) -> None:
        self._store, self._rank = store, rank
        self._slots = torch.zeros(2 + num_workers, dtype=torch.int64, device="cpu")
        store.init(f"{KEY}s", self._slots)

    def meet(self, own: bool, number: int, following: int) -> tuple[int, int, list[int]]:
        """Meet the other workers.

        Args:
            own: whether this worker would add something of its own to a checkpoint.
            number: at worker 0, of the checkpoint to make; 0 for none, and at other workers.
            following: at worker 0, the rounds at which the next meeting is; 0 at other workers.

        Returns:
            The number and the rounds of worker 0, 0 where it was not there, and the ranks that add something.
        """
        self._slots.zero_()
        self._slots[0], self._slots[1] = number, following
        self._slots[2 + self._rank] = int(own)
        self._store.pushpull(f"{KEY}s", self._slots)
        sums: list[int] = self._slots.tolist()
        return sums[0], sums[1], [rank for rank, has in enumerate(sums[2:]) if has]

    def begin_join(self) -> None:
        """Let the others meet without this worker."""
        self._store.begin_join()

    def join(self) -> None:
        """Wait until all workers have joined."""
        self._store.join()
