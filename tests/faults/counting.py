"""What a worker does while servers are killed: it counts every push, and notes when each round began and ended.

``python -m faults.counting DIRECTORY MODE`` is such a worker. It ends after the round that the file ``stop`` in the
directory says.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kvstore as kv
from faults.plan import pushed
from faults.training import BOUND, KEYS, SIZES, Wrong

# The kinds of stores: of each its type, its options, and the encoding of its gradients.
STORES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "sync": ("dist_sync", {}, None),
    "async": ("dist_async", {}, None),
    "ssp": ("dist_ssp", {"staleness": 3}, None),
    "keep": ("dist_sync", {"quorum": 1, "late": "keep"}, None),
    "coded": ("dist_sync", {}, {"type": "2bit", "threshold": 0.5, "pull": "fp16"}),
    "assigned": ("dist_sync", {}, None),
    "rows": ("dist_sync", {}, None),
    "rows-async": ("dist_async", {}, None),
    "rows-coded": ("dist_sync", {}, None),
}
SAME_BITS = ("sync", "coded", "assigned", "rows", "rows-coded")  # those that end with the bits of an undisturbed run
READS = 3  # of an assigned sum
RING = 64  # rounds after which the gradients of ``coded`` are repeated


class Counting:
    """One worker.

    Args:
        directory: of the run: ``stop`` is read, ``round-RANK`` and ``times-RANK`` are written.
        mode: one of ``STORES``.
        pause_s: between two rounds.
    """

    def __init__(self, directory: Path, mode: str, pause_s: float = 0.0) -> None:
        kind, options, compression = STORES[mode]
        self.store = kv.create(kind, bigarray_bound=BOUND, **options)
        self._mode = mode
        self._pause_s = pause_s
        self._stop = directory / "stop"
        self._progress = os.open(directory / f"round-{self.store.rank}", os.O_WRONLY | os.O_CREAT)
        self._times_path = directory / f"times-{self.store.rank}"
        self._times = array("d")
        self._values = [torch.zeros(size) for size in SIZES.values()]
        self._outs = [torch.zeros(size) for size in SIZES.values()]
        self._own = self._all = 0  # what this worker, and all, have pushed so far
        if compression is not None:
            self.store.set_gradient_compression(compression)
        self._begin(mode)
        self.store.barrier()

    def _begin(self, mode: str) -> None:
        if mode == "coded":
            self.store.set_optimizer("adam", learning_rate=0.001)
            dice = torch.Generator().manual_seed(self.store.rank)
            self._gradients = [[torch.randn(size, generator=dice) for size in SIZES.values()] for _ in range(RING)]
        else:
            self.store.set_optimizer("sgd", learning_rate=1.0)
        self.store.init(KEYS, self._outs)

    def run(self) -> None:
        print("training", flush=True)
        made = 0
        while not self._over(made):
            made += 1
            began = time.monotonic()
            self._round(made)
            self._times.extend((began, time.monotonic()))
            os.pwrite(self._progress, b"%20d" % made, 0)
            self._check(made)
            if self._pause_s:
                time.sleep(self._pause_s)
        self.store.barrier()
        self._end(made)
        bits = hashlib.sha256(b"".join(out.numpy().tobytes() for out in self._outs)).hexdigest()
        self._times_path.write_bytes(self._times.tobytes())
        print(f"exact after {made} rounds: {bits} and {self.store.statistics()}", flush=True)
        self.store.close()

    def _round(self, made: int) -> None:
        self.store.pushpull(KEYS, self._gradient(made), self._outs)

    def _end(self, made: int) -> None:
        """Read everything, and hold it to what it must be."""
        self.store.pull(KEYS, self._outs)
        if self._mode in ("sync", "async", "ssp"):
            self._require({float(self._all)}, made)

    def _over(self, made: int) -> bool:
        try:
            return made >= int(self._stop.read_text())
        except FileNotFoundError:
            return False

    def _gradient(self, number: int) -> list[torch.Tensor]:
        if self._mode == "coded":
            return self._gradients[number % RING]
        own = pushed(self.store.rank, number)
        self._own += own
        self._all += sum(pushed(rank, number) for rank in range(self.store.num_workers))
        for value in self._values:
            value.fill_(float(own))
        return self._values

    def _check(self, made: int) -> None:
        if self._mode == "sync":
            self._require({float(self._all)}, made)
        elif self._mode in ("async", "ssp"):
            for key, out in zip(KEYS, self._outs, strict=True):
                for value in torch.unique(-out).tolist():
                    if value < self._own or not value.is_integer():
                        raise Wrong(f"{key!r} after round {made} in {self._mode}: {value}, own pushes are {self._own}")

    def _require(self, right: set[float], made: int) -> None:
        for key, out in zip(KEYS, self._outs, strict=True):
            values = set(torch.unique(-out).tolist())
            if values != right:
                raise Wrong(f"{key!r} after round {made} in {self._mode}: {sorted(values)[:5]} instead of {right}")


class AssignedCounting(Counting):
    """One worker whose store has no optimizer: each round's sum replaces the value before, and no two sums are alike.

    A standby has such a sum in the memory that the record of it came in, which may be that of the server that is
    killed. The next round repairs what a standby has wrong, so most of the time goes to reading.
    """

    def _begin(self, mode: str) -> None:
        self.store.init(KEYS, self._outs)

    def _gradient(self, number: int) -> list[torch.Tensor]:
        for value in self._values:
            value.fill_(float(-self._pushed(self.store.rank, number)))
        return self._values

    def _check(self, made: int) -> None:
        right = {float(sum(self._pushed(rank, made) for rank in range(self.store.num_workers)))}
        self._require(right, made)
        for _ in range(READS):
            for out in self._outs:
                out.fill_(1.0)
            self.store.pull(KEYS, self._outs)
            self._require(right, made)

    def _end(self, made: int) -> None:
        self._check(made)

    @staticmethod
    def _pushed(rank: int, number: int) -> int:
        return 2 * number + rank


class RowCounting(Counting):
    """One worker with tables. In each round some rows are pushed, and all rows count how often.

    With ``rows-coded`` rows also come and go, have an optimizer with states, and travel encoded.
    """

    def _begin(self, mode: str) -> None:
        self._exact = mode != "rows-coded"
        self._ids = {"fixed": np.arange(5000), "grows": np.arange(3000) * 2**40 - 2**50}
        self._counts = {key: np.zeros(len(ids)) for key, ids in self._ids.items()}  # what all have pushed to each row
        widths = {"fixed": 8, "grows": 4}
        self._outs = [torch.zeros(len(self._ids[key]), width) for key, width in widths.items()]
        if self._exact:
            self.store.set_optimizer("sgd", learning_rate=1.0)
            tables = [kv.Table(shape=(5000, 8)), kv.Table(dim=4)]
        else:
            self.store.set_optimizer("adam", learning_rate=0.001)
            evict: list[Any] = [kv.Unseen(rounds=20), kv.Capacity(2500, by="count")]
            grows = kv.Table(dim=4, init="normal", admit=kv.MinCount(2), evict=evict, codec="int8")
            tables = [kv.Table(shape=(5000, 8), init="uniform", codec="fp16"), grows]
        self.store.init(list(self._ids), tables)

    def _round(self, made: int) -> None:
        gradients = []
        for key, out in zip(self._ids, self._outs, strict=True):
            for rank in range(self.store.num_workers):
                noise = np.random.default_rng([rank, made % RING, len(key)])
                chosen = noise.random(len(self._ids[key])) < 0.2
                if rank == self.store.rank:
                    shape = int(chosen.sum()), out.shape[1]
                    rows = np.full(shape, pushed(rank, made)) if self._exact else noise.standard_normal(shape)
                    gradients.append(kv.RowSparse(self._ids[key][chosen], rows.astype(np.float32)))
                self._counts[key][chosen] += pushed(rank, made)
        self.store.pushpull(list(self._ids), gradients, self._outs, row_ids=list(self._ids.values()))

    def _check(self, made: int) -> None:
        if self._mode == "rows":
            self._require_rows(made)

    def _end(self, made: int) -> None:
        for (key, ids), out in zip(self._ids.items(), self._outs, strict=True):
            self.store.row_sparse_pull(key, out, row_ids=ids)
        if self._exact:
            self._require_rows(made)

    def _require_rows(self, made: int) -> None:
        for (key, counts), out in zip(self._counts.items(), self._outs, strict=True):
            wrong = (-out.numpy() != counts[:, None]).any(axis=1)
            if wrong.any():
                at = int(wrong.argmax())
                raise Wrong(f"row {at} of {key!r} after round {made}: {out[at].tolist()} instead of {-counts[at]}")


def counting(directory: Path, mode: str, pause_s: float = 0.0) -> Counting:
    if mode == "assigned":
        return AssignedCounting(directory, mode, pause_s)
    return (RowCounting if mode.startswith("rows") else Counting)(directory, mode, pause_s)


if __name__ == "__main__":
    torch.set_num_threads(1)
    counting(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]) if len(sys.argv) > 3 else 0.0).run()
