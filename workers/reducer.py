"""Sums and averages over all workers, for what is not trained: metrics, batch-norm statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import kvstore as kv


class Reducer:
    """All-reduces by name, through a synchronous store of its own, whatever store the parameters have.

    Its calls are collective: every worker makes them with the same names.

    Args:
        kind: the type of the training's store; of ``dist_*`` the workers of the job are meant, else this process alone.
    """

    def __init__(self, kind: str = "dist_sync") -> None:
        self._store = kv.create("dist_sync" if kind.startswith("dist") else "local")
        self._known: set[str] = set()

    def sum(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Return each number's sum over the workers."""
        totals = {f"number/{name}": torch.tensor([value], dtype=torch.float64) for name, value in numbers.items()}
        self._allreduce(totals)
        return {name: float(totals[f"number/{name}"]) for name in numbers}

    def average(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace each tensor by its mean over the workers, rounded down for integers (batch counts)."""
        floats = {f"tensor/{name}": t for name, t in tensors.items() if t.is_floating_point()}
        self._allreduce(floats)
        for tensor in floats.values():
            tensor.div_(self._store.num_workers)
        counts = {f"tensor/{name}": t for name, t in tensors.items() if not t.is_floating_point()}
        self._allreduce(counts)
        for tensor in counts.values():
            tensor.div_(self._store.num_workers, rounding_mode="floor")

    def close(self) -> None:
        """End the use of the store."""
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
