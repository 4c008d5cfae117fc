"""What workers do with tables in jobs whose servers die; see ``exactness``.

``RowCounting`` pushes powers of four to rows, whose digits say how often each push counts. ``RowBits`` has tables with
everything that decides later rows (optimizers' states, admission, eviction), and returns bytes.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from simulation.exactness import PUSHES
from simulation.programs import Interrupted, Wrong

import kvstore as kv
from kvstore.dist import DistStore

KEYS = ["fixed", "grows"]
IDS = {"fixed": np.arange(12), "grows": np.array([-(2**62), -5, *range(10), 2**40, 2**62])}
WIDTHS = {"fixed": 3, "grows": 2}


class RowCounting:
    """Push a power of four to all rows each time, in different ways; look at how often each counts.

    Args:
        seed: decides the ways.
        rule: see ``Counting``.
        uneven: whether rank 0 pushes less often, and all end with ``join``.
        rounds: that each worker pushes; as many as can be told apart by default.

    Attributes:
        armed: the ranks whose calls may be interrupted now.
    """

    def __init__(self, seed: int, rule: str = "sync", uneven: bool = False, rounds: int = PUSHES) -> None:
        self.armed: set[int] = set()
        self._seed = seed
        self._rule = rule
        self._uneven = uneven
        self._rounds = rounds
        self._exact = rule not in ("drop", "keep")

    def __call__(self, store: DistStore) -> list[list[float]]:
        """Train; return the rows at the end.

        Raises:
            Wrong: a push counts twice, or not at all.
        """
        dice = random.Random(f"{self._seed} {store.rank}")
        store.set_optimizer("sgd", learning_rate=1.0)
        dense = torch.zeros(5)
        store.init("dense", dense)
        store.init(KEYS, [kv.Table(shape=(12, 3)), kv.Table(dim=2)])
        rounds = min(self._rounds, PUSHES // store.num_workers)
        own = rounds - (1 if self._uneven and store.rank == 0 else 0)
        made = 0
        while made < own:
            self._push(store, dice, 4.0 ** (made * store.num_workers + store.rank))
            made = store.statistics().pushes // (1 + len(KEYS))
            self._look(store, self._read(store, dice), made, "in the middle")
            if self._rule == "keep":  # of two late ones a round would make thirds
                store.barrier()
        if self._uneven:
            store.join()
        else:
            store.barrier()
        rows = self._read(store, dice)
        self._look(store, rows, made, "at the end")
        self._all(store, rows, made, rounds)
        return [value.reshape(-1).tolist() for value in rows.values()]

    def _push(self, store: DistStore, dice: random.Random, value: float) -> None:
        gradients = [torch.full((5,), value), *(_gradient(key, value) for key in KEYS)]
        way = dice.randrange(3)
        self.armed.add(store.rank)
        try:
            if way == 0:
                outs = [torch.empty(5), *(torch.empty(len(IDS[key]), WIDTHS[key]) for key in KEYS)]
                store.pushpull(["dense", *KEYS], gradients, outs, row_ids=[None, *(IDS[key] for key in KEYS)])
            elif way == 1:
                store.push(["dense", *KEYS], gradients)
            else:
                for key, gradient in zip(["dense", *KEYS], gradients, strict=True):
                    store.push(key, gradient)
        except Interrupted:
            if way == 2:  # some keys were pushed
                raise
        finally:
            self.armed.discard(store.rank)
            for gradient in gradients[1:]:
                gradient.rows.fill_(1e6)  # it has been copied

    def _read(self, store: DistStore, dice: random.Random) -> dict[str, torch.Tensor]:
        rows = {}
        for key in KEYS:
            order = dice.sample(range(len(IDS[key])), len(IDS[key]))
            rows[key] = torch.empty(len(order), WIDTHS[key])
            store.row_sparse_pull(key, rows[key], row_ids=IDS[key][order])
        return rows

    def _look(self, store: DistStore, rows: dict[str, torch.Tensor], made: int, when: str) -> None:
        """Require that nothing counts twice, and that what this worker has been answered counts."""
        for key, digits in self._digits(rows, when):
            if max(digits) > (1 if self._exact else 2) or (not self._exact and sum(digits) % 2):
                raise Wrong(f"{key!r} {when} in {self._rule}: counted {digits}")
            own = digits[store.rank : made * store.num_workers : store.num_workers]
            if self._exact and not all(own):
                raise Wrong(f"{key!r} {when} in {self._rule}: own pushes counted {own}")

    def _all(self, store: DistStore, rows: dict[str, torch.Tensor], made: int, rounds: int) -> None:
        """Require that each push of each worker counts, or is known to have been late."""
        missing = 0
        for key, digits in self._digits(rows, "at the end"):
            wanted = [1] * (rounds * store.num_workers)
            if self._uneven:
                wanted[(rounds - 1) * store.num_workers] = 0
            if self._exact and digits[: len(wanted)] != wanted:
                raise Wrong(f"{key!r} at the end in {self._rule}: counted {digits} instead of {wanted}")
            missing += digits[store.rank : made * store.num_workers : store.num_workers].count(0)
        late = store.statistics().late
        if not self._exact and missing > late * 2:  # a segment of a table may have other digits on each server
            raise Wrong(f"{missing} own pushes do not count, and {late} segments were late")

    def _digits(self, rows: dict[str, torch.Tensor], when: str) -> list[tuple[str, list[int]]]:
        found = []
        for key, values in rows.items():
            for value in sorted(set((-values).reshape(-1).tolist())):
                if not value.is_integer() or not 0 <= value < 4**PUSHES:
                    raise Wrong(f"{key!r} {when} in {self._rule}: {value}")
                found.append((key, [int(value) >> (2 * place) & 3 for place in range(PUSHES)]))
        return found


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
