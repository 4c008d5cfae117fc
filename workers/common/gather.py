"""``Gather``: an all-gather of a few integers, with which workers check that they agree.

It uses a store that sums. Integers are never compressed.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import torch

from kvstore import AlreadyInitialized, DeadlineExceeded, KVStore, KVStoreError, Mismatch, UsageError
from kvstore.ticket import Ticket
from workers.common.stores import updates_each_push

NO_SUM = (
    "this store does not sum what is pushed: it has an optimizer or updater. The optimizer must stay in the worker: "
    "pass a store on which set_optimizer has not been called"
)


class Gather:
    """An all-gather: each worker adds its row to a table of zeros.

    Args:
        key: the key of the table. Names of parameters do not begin with a slash, so begin it with one.
        shared: whether the store may already have the table; otherwise the store must be for this alone.
    """

    def __init__(self, store: KVStore, key: str, width: int = 8, *, shared: bool = True) -> None:
        require_sums(store.type)
        self._store, self._key, self._width = store, key, width
        # A push cannot be taken back. So a call that has timed out leaves its row, and the next call waits on.
        self._sent: tuple[list[int], torch.Tensor, Ticket] | None = None  # a row that waits for the other workers' rows
        try:
            store.init(key, self._table() - 1)  # not 0: an updater that adds would go unnoticed
        except AlreadyInitialized:
            if not shared:
                raise UsageError(
                    "this store already keeps another model in step; make a second one with kvstore.create"
                ) from None
        except Mismatch as exc:  # an optimizer takes no integers
            raise UsageError(NO_SUM) from exc

    @property
    def waiting(self) -> bool:
        """Whether an ``exchange`` has timed out, and its row waits for the others."""
        return self._sent is not None

    def exchange(self, numbers: Sequence[int], timeout: float | None = None) -> dict[int, list[int]]:
        """Return the rows of all workers that are not lost or inside ``join``, by rank. Every worker calls this.

        Args:
            numbers: this worker's row: at most ``width`` numbers, the first not 0. Zeros fill the rest.
            timeout: how long to wait, in seconds; None for the store's deadline. 0 only looks.
        """
        mine = [*numbers] + [0] * (self._width - len(numbers))
        if self._sent is None or self._sent[0] != mine:
            table = self._table()
            table[self._store.rank] = torch.tensor(mine, dtype=torch.int64, device="cpu")
            try:
                self._sent = mine, table, self._store.pushpull(self._key, table, wait=False)
            except Mismatch as exc:
                raise UsageError(NO_SUM) from exc
        _, table, ticket = self._sent
        if timeout == 0 and not ticket.done():
            raise DeadlineExceeded(f"{ticket} is not done: other workers have not come yet")
        try:
            ticket.wait(timeout)
        except DeadlineExceeded:
            raise
        except KVStoreError as exc:
            self._sent = None
            if isinstance(exc, Mismatch):
                raise UsageError(NO_SUM) from exc
            raise
        self._sent = None
        rows: list[list[int]] = table.tolist()
        if rows[self._store.rank] != mine and not self._store.newcomer:  # there it is the row of the process before
            raise UsageError(NO_SUM)
        return {rank: row for rank, row in enumerate(rows) if row[0]}

    def mean(self, number: float) -> float:
        """Return the mean of all workers' numbers, with the same bits on all; ``width`` must be 2."""
        # As integers, which are never compressed. Each worker then makes the same sum.
        theirs = [number_of(bits) for _, bits in self.exchange([1, bits_of(number)]).values()]
        return float(sum(theirs) / len(theirs))

    def _table(self) -> torch.Tensor:
        return torch.zeros(self._store.max_workers, self._width, dtype=torch.int64, device="cpu")


def require_sums(kind: str) -> None:
    if updates_each_push(kind):
        raise UsageError(f"a {kind!r} store updates for every push; averages need 'dist_sync' or 'local'")


def bits_of(number: float) -> int:
    """The bits of ``number`` as a float64, as an integer, which ``number_of`` turns back."""
    (bits,) = struct.unpack("<q", struct.pack("<d", number))
    return int(bits)


def number_of(bits: int) -> float:
    (number,) = struct.unpack("<d", struct.pack("<q", bits))
    return float(number)


def digest(text: str) -> int:
    """52 bits that stand for ``text``."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") >> 4
