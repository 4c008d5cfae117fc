"""A worker of a long job that does a little of everything, again and again; rank 0 notes what its processes hold.

Each unit of work is some rounds of arrays and of a table, a key that stays, a store that is opened, used and closed,
and now and then a checkpoint, a saved table, a report and an eviction.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import kvstore as kv
from benchmarks.programs.servers import memory_of_servers
from benchmarks.programs.stopwatch import parser, report

ROUNDS = 100  # of arrays, in one unit
CHECKPOINT, TABLE, EVICTION = 3, 5, 10  # every so many units
ROWS, WIDTH = 50_000, 16


def main() -> None:
    """Run units until ``--seconds`` are over; rank 0 reports what the servers held after each of ``--samples``."""
    options = parser()
    options.add_argument("--seconds", type=float, default=720.0)
    options.add_argument("--samples", type=int, default=48)
    args = options.parse_args()
    store = kv.create("dist_sync")
    store.set_optimizer("sgd", learning_rate=0.01, momentum=0.9)
    keys = [f"w{number}" for number in range(11)]
    weights = [torch.randn(64, 64) for _ in keys[1:]] + [torch.randn(300_000)]
    store.init(keys, weights)
    store.init("table", kv.Table(dim=WIDTH, init="constant", evict=kv.Capacity(ROWS // 2)))
    gradients = [torch.full_like(weight, 1e-6) for weight in weights]
    draws, alike = np.random.default_rng(store.rank), np.random.default_rng(0)  # the latter on all workers
    memory: list[tuple[float, list[dict[str, float]]]] = []
    saved = Path(tempfile.gettempdir()) / f"kvstore-soak-{args.report.parent.name}"
    start, unit, done = time.monotonic(), 0, torch.zeros(1)
    store.init("done", torch.zeros(1))
    while not done.item():
        for _ in range(ROUNDS):
            store.pushpull(keys, gradients, weights)
        ids = np.unique(draws.integers(0, ROWS, 400) + unit)
        rows = torch.empty(len(ids), WIDTH)
        store.pushpull("table", kv.RowSparse(ids, torch.ones(len(ids), WIDTH)), rows, row_ids=ids)
        store.init(f"key {unit}", torch.zeros(100))
        use_a_store([int(size) for size in alike.integers(1, 50_000, int(alike.integers(1, 6)))])
        if unit % CHECKPOINT == 0:
            store.save_checkpoint()
        if unit % TABLE == 0:
            if store.rank == 0:
                shutil.rmtree(saved, ignore_errors=True)
            store.barrier()
            store.save_table("table", saved)
        if unit % EVICTION == 0:
            store.evict("table")
        store.report({"loss": 1.0})
        unit += 1
        over = time.monotonic() - start
        if store.rank == 0 and over >= len(memory) * args.seconds / args.samples:
            memory.append((over, memory_of_servers()))
        ends = store.rank == 0 and over > args.seconds
        store.pushpull("done", torch.full((1,), -100.0 * ends), done)
    shutil.rmtree(saved, ignore_errors=True)
    if store.rank == 0:
        report(args.report, memory=memory, units=unit, times=[])
    store.close()


def use_a_store(sizes: list[int]) -> None:
    store = kv.create("dist_sync")
    store.set_optimizer("adam", learning_rate=0.1)
    keys = list(range(len(sizes)))
    store.init(keys, [torch.zeros(size) for size in sizes])
    for _ in range(3):
        store.pushpull(keys, [torch.ones(size) for size in sizes], [torch.empty(size) for size in sizes])
    store.close()


if __name__ == "__main__":
    main()
