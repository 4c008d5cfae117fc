"""The meetings of a job's workers, where all hear what worker 0 has decided."""

from __future__ import annotations

from typing import Any, Protocol

import torch

KEY = "checkpoint"
MOST_TEXT = 600  # characters that say why a worker's part failed


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
        self._failed = torch.zeros(num_workers, dtype=torch.int64, device="cpu")
        self._text = torch.zeros(MOST_TEXT, dtype=torch.int64, device="cpu")
        store.init([f"{KEY}s", f"{KEY}.failed", f"{KEY}.why"], [self._slots, self._failed, self._text])

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

    def failure(self, why: str) -> str:
        """Hear whether all workers have what they add to a checkpoint, after a meeting that has decided on one.

        Args:
            why: what keeps this worker from it; empty for nothing.

        Returns:
            Which worker fails, the first of them, and why; empty if none does.
        """
        self._failed.zero_()
        self._failed[self._rank] = int(bool(why))
        self._store.pushpull(f"{KEY}.failed", self._failed)
        failed = self._failed.nonzero().flatten().tolist()
        if not failed:
            return ""
        self._text.zero_()
        if failed[0] == self._rank:
            self._text[: len(why)] = torch.tensor([*map(ord, why[:MOST_TEXT])], dtype=torch.int64, device="cpu")
        self._store.pushpull(f"{KEY}.why", self._text)
        return f"worker {failed[0]}: {''.join(chr(code) for code in self._text.tolist() if code)}"

    def begin_join(self) -> None:
        """Let the others meet without this worker."""
        self._store.begin_join()

    def join(self) -> None:
        """Wait until all workers have joined."""
        self._store.join()
