"""Gather: a few integers of every worker for all, so that workers find out whether they mean the same.

It goes through a store that sums. No codec touches integers.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import torch

from kvstore import AlreadyInitialized, KVStore, Mismatch, UsageError

NO_SUM = (
    "this store does not sum what is pushed: it has an optimizer or updater; the optimizer stays in the worker here, "
    "so pass a store on which set_optimizer has not been called"
)


class Gather:
    """An all-gather: each worker adds its row to a table of zeros.

    Args:
        store: synchronous, without an optimizer.
        key: of the table; no name of a parameter begins with a slash.
        width: integers of 64 bits in a row.
        shared: a table that the store has already goes on being used; else the store must be for this alone.

    Raises:
        UsageError: the store is asynchronous, or serves another already.
    """

    def __init__(self, store: KVStore, key: str, width: int = 8, *, shared: bool = True) -> None:
        require_sums(store.type)
        self._store, self._key, self._width = store, key, width
        try:
            store.init(key, self._table() - 1)  # not 0, which an updater that adds would pass for
        except AlreadyInitialized:
            if not shared:
                raise UsageError(
                    "this store keeps another model in step already; make one more with kvstore.create"
                ) from None
        except Mismatch as exc:  # an optimizer takes no integers
            raise UsageError(NO_SUM) from exc

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the rows of all workers, by rank; every worker calls it.

        Args:
            numbers: at most ``width``, the first of them not 0; the rest of the row is zeros.

        Raises:
            UsageError: the store does something else than summing.
        """
        table, mine = self._table(), [*numbers] + [0] * (self._width - len(numbers))
        table[self._store.rank] = torch.tensor(mine)
        try:
            self._store.pushpull(self._key, table)
        except Mismatch as exc:
            raise UsageError(NO_SUM) from exc
        rows: list[list[int]] = table.tolist()
        if rows[self._store.rank] != mine:
            raise UsageError(NO_SUM)
        return rows

    def mean(self, number: float) -> float:
        """Return the mean of all workers' numbers, the same to the bit on all; the table is 2 wide."""
        (bits,) = struct.unpack("<q", struct.pack("<d", number))
        theirs = [struct.unpack("<d", struct.pack("<q", its))[0] for _, its in self.exchange([1, bits])]
        return float(sum(theirs) / len(theirs))

    def _table(self) -> torch.Tensor:
        return torch.zeros(self._store.num_workers, self._width, dtype=torch.int64)


def require_sums(kind: str) -> None:
    """Raise ``UsageError`` if a store of type ``kind`` updates for every push, so that it cannot sum."""
    if "async" in kind or "ssp" in kind:
        raise UsageError(f"a {kind!r} store updates for every push; averages need 'dist_sync' or 'local'")


def digest(text: str) -> int:
    """Return 52 bits that stand for ``text``."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") >> 4
