"""What workers do with tables in jobs whose servers die; see ``exactness``.

``RowCounting`` and ``TwinCounting`` push powers of four to rows, whose digits say how often each push counts.
``RowBits`` has tables with everything that decides later rows (optimizers' states, admission, eviction), and returns
bytes.
"""

from __future__ import annotations

import random
from typing import Any, ClassVar

import numpy as np
import torch
from simulation.exactness import Counting

import kvstore as kv
from kvstore.client import DistStore

KEYS = ["fixed", "grows"]
IDS = {"fixed": np.arange(12), "grows": np.array([-(2**62), -5, *range(10), 2**40, 2**62])}
WIDTHS = {"fixed": 3, "grows": 2}


class RowCounting(Counting):
    """Push a power of four to all rows each time, and to an array; look at how often each counts. See ``Counting``."""

    keys: ClassVar = ["dense", *KEYS]
    parts = 2  # a table has other rows on each server

    def _init(self, store: DistStore) -> None:
        store.init("dense", torch.zeros(5))
        store.init(KEYS, [kv.Table(shape=(12, 3)), kv.Table(dim=2)])

    def _gradients(self, value: float) -> list[Any]:
        return [torch.full((5,), value), *(_gradient(key, value) for key in KEYS)]

    def _pushpull(self, store: DistStore, gradients: list[Any]) -> None:
        outs = [torch.empty(5), *(torch.empty(len(IDS[key]), WIDTHS[key]) for key in KEYS)]
        store.pushpull(self.keys, gradients, outs, row_ids=[None, *(IDS[key] for key in KEYS)])

    def _spoil(self, gradients: list[Any]) -> None:
        for gradient in gradients[1:]:
            gradient.rows.fill_(1e6)

    def _read(self, store: DistStore, dice: random.Random) -> dict[str, torch.Tensor]:
        rows = {}
        for key in KEYS:
            order = dice.sample(range(len(IDS[key])), len(IDS[key]))
            rows[key] = torch.empty(len(order), WIDTHS[key])
            store.row_sparse_pull(key, rows[key], row_ids=IDS[key][order])
        return rows


class TwinCounting(RowCounting):
    """Push to two tables of one kind, whose pushes a server takes together. See ``RowCounting``."""

    keys: ClassVar = ["one", "other"]
    ids: ClassVar = np.arange(12)

    def _init(self, store: DistStore) -> None:
        store.init(self.keys, [kv.Table(shape=(12, 4)) for _ in self.keys])

    def _gradients(self, value: float) -> list[Any]:
        return [kv.RowSparse(self.ids, np.full((12, 4), value, np.float32)) for _ in self.keys]

    def _pushpull(self, store: DistStore, gradients: list[Any]) -> None:
        store.pushpull(self.keys, gradients, [torch.empty(12, 4) for _ in self.keys], row_ids=[self.ids] * 2)

    def _spoil(self, gradients: list[Any]) -> None:
        for gradient in gradients:
            gradient.rows.fill_(1e6)

    def _read(self, store: DistStore, dice: random.Random) -> dict[str, torch.Tensor]:
        if dice.random() < 0.5:
            rows = store.row_sparse_pull(self.keys, row_ids=[self.ids] * 2)
            return dict(zip(self.keys, rows, strict=True))
        return {key: store.row_sparse_pull(key, row_ids=self.ids) for key in self.keys}


class RowBits:
    """Train rows with optimizers that have states, and tables that grow and shrink; return all bytes.

    Args:
        seed: decides which rows are pushed, the optimizers and the codec.
        rounds: with each optimizer.
    """

    def __init__(self, seed: int, rounds: int = 3) -> None:
        self.armed: set[int] = set()
        self._seed = seed
        self._rounds = rounds

    def __call__(self, store: DistStore) -> list[bytes]:
        """Train; return the rows of each step: what is wrong in a state shows in the next ones."""
        dice = random.Random(self._seed)
        noise = np.random.default_rng([self._seed, store.rank])
        codec = dice.choice((None, "fp16", "int8"))
        first, second = dice.sample(
            [
                ("adam", {"learning_rate": 0.1}),
                ("sgd", {"learning_rate": 0.1, "momentum": 0.9}),
                ("ftrl", {"learning_rate": 0.1}),
                ("rowwiseadagrad", {"learning_rate": 0.1}),
            ],
            2,
        )
        found: list[bytes] = []
        store.set_optimizer(first[0], **first[1])
        evict = [kv.Unseen(rounds=2), kv.Capacity(9, by=dice.choice(("age", "count")))]
        grows = kv.Table(dim=2, init="normal", seed=4, admit=kv.MinCount(2), evict=evict, codec=codec)
        store.init(KEYS, [kv.Table(shape=(12, 3), init="uniform", codec=codec), grows])
        self._train(store, noise, found)
        store.evict("grows")
        self._train(store, noise, found)
        store.set_optimizer(second[0], **second[1])
        store.init("new", kv.Table(dim=1, admit=kv.Probability(0.5)))
        self._train(store, noise, found, ["new"])
        store.barrier()
        for key in KEYS:
            found.append(store.row_sparse_pull(key, row_ids=IDS[key]).numpy().tobytes())
            counts = store.table_statistics(key)
            found.append(repr([counts[name] for name in ("rows", "version", "refused")]).encode())
        return found

    def _train(
        self, store: DistStore, noise: np.random.Generator, found: list[bytes], more: list[str] | None = None
    ) -> None:
        keys = KEYS + (more or [])
        for _ in range(self._rounds):
            ids = [IDS.get(key, np.arange(5)) for key in keys]
            chosen = [every[noise.random(len(every)) < 0.3] for every in ids]
            gradients = [
                kv.RowSparse(own, noise.standard_normal((len(own), WIDTHS.get(key, 1))).astype(np.float32))
                for key, own in zip(keys, chosen, strict=True)
            ]
            outs = [torch.empty(len(every), WIDTHS.get(key, 1)) for key, every in zip(keys, ids, strict=True)]
            store.pushpull(keys, gradients, outs, row_ids=ids)
            found += [out.numpy().tobytes() for out in outs]


def _gradient(key: str, value: float) -> kv.RowSparse:
    """Return a gradient of all rows, one of them given twice, in halves."""
    ids = np.concatenate([IDS[key], IDS[key][:1]])
    rows = np.full((len(ids), WIDTHS[key]), value, np.float32)
    rows[[0, -1]] = value / 2
    return kv.RowSparse(ids, rows)
