"""Sums and averages over all workers of what is not trained: metrics, batch-norm statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import kvstore as kv
from kvstore import KVStore
from kvstore.errors import warn_renamed
from kvstore.store.maker import made_by
from workers.common.stores import store_type


class Reducer:
    """All-reduces by name, through its own synchronous store, whatever store the parameters have.

    Its methods are collective: every worker calls them with the same names.

    Args:
        kvstore: the training's store, or its type. With a ``dist_*`` store the sums are over all workers of the job,
            with any other they are this process's own. ``auto``: all workers in a job, this process outside of one.
        kind: the former name of ``kvstore``; it warns.
    """

    def __init__(self, kvstore: KVStore | str = "auto", *, kind: str | None = None) -> None:
        if kind is not None:
            warn_renamed("kind=", "kvstore=")
            kvstore = kind
        with made_by("Reducer"):
            self._store = kv.create("dist_sync" if store_type(kvstore).startswith("dist") else "local")
        self._known: set[str] = set()

    @classmethod
    def over(cls, store: KVStore) -> Reducer:
        """Return a reducer that uses ``store``: synchronous, without optimizer, for this alone."""
        reducer = cls("local")
        reducer._store = store
        return reducer

    def sum(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Return the sum over the workers of each of ``numbers``, by name."""
        totals = {
            f"number/{name}": torch.tensor([value], dtype=torch.float64, device="cpu")
            for name, value in numbers.items()
        }
        self._allreduce(totals)
        return {name: float(totals[f"number/{name}"]) for name in numbers}

    def average(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace each of ``tensors``, by name, by its mean over the workers.

        Means of integers (batch counts) are rounded down.
        """
        floats = {f"tensor/{name}": t for name, t in tensors.items() if t.is_floating_point()}
        self._allreduce(floats)
        for tensor in floats.values():
            tensor.div_(self._store.num_workers)
        counts = {f"tensor/{name}": t for name, t in tensors.items() if not t.is_floating_point()}
        self._allreduce(counts)
        for tensor in counts.values():
            tensor.div_(self._store.num_workers, rounding_mode="floor")

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def __enter__(self) -> Reducer:
        return self

    def __exit__(self, *exc: Any) -> None:
        if exc[0] is None:
            self.close()

    def _allreduce(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if not tensors:
            return
        new = [name for name in tensors if name not in self._known]
        if new:
            self._store.init(new, [tensors[name] for name in new])
            self._known.update(new)
        self._store.pushpull(list(tensors), list(tensors.values()))
