"""Marks: a few numbers that every worker shows all others, so that they find out whether they mean the same."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from kvstore import AlreadyInitialised, KVStore, UsageError

WIDTH = 8  # numbers a worker
NBYTES = 8 * WIDTH  # bytes a worker
KEY = "/marks"  # no name of a parameter begins with a slash


class Marks:
    """An all-gather over a store that sums: each worker adds its row to a table of zeros.

    Args:
        store: synchronous, without an optimizer.

    Raises:
        UsageError: the store is asynchronous, or serves another table.
    """

    def __init__(self, store: KVStore) -> None:
        if "async" in store.type:
            raise UsageError(f"a {store.type!r} store updates for every push; averages need 'dist_sync' or 'local'")
        self._store = store
        try:
            store.init(KEY, torch.ones_like(self._table()))  # not 0, which an updater that adds would pass for
        except AlreadyInitialised:
            raise UsageError(
                "this store keeps another model in step already; make one more with kvstore.create"
            ) from None

    def exchange(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers that each worker has passed, by rank; every worker calls it.

        Args:
            numbers: at most ``WIDTH``, the first of them not 0; integers below 2^53 come back as they are.

        Raises:
            UsageError: the store does something else than summing.
        """
        mine, table = [*map(float, numbers)], self._table()
        mine += [0.0] * (WIDTH - len(mine))
        table[self._store.rank] = torch.tensor(mine, dtype=torch.float64)
        self._store.pushpull(KEY, table)
        rows: list[list[float]] = table.tolist()
        if rows[self._store.rank] != mine:
            raise UsageError(
                "this store does not sum what is pushed: it has an optimizer or updater; the optimizer stays in the "
                "worker here, so pass a store on which set_optimizer has not been called"
            )
        return rows

    def _table(self) -> torch.Tensor:
        return torch.zeros(self._store.num_workers, WIDTH, dtype=torch.float64)


def digest(text: str) -> int:
    """Return 52 bits that stand for ``text``."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") >> 4
