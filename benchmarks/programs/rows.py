"""A worker's rounds with tables: rows are pushed, and the same rows pulled; each round has other random ids.

The ids are among rows that are there, or with ``--fresh`` come for the first time. With ``--push`` nothing is pulled,
and with ``--array`` the rows are those of an array.
"""

from __future__ import annotations

import argparse
import itertools

import numpy as np
import torch

import kvstore as kv
from benchmarks.programs.stopwatch import measured, parser, report

PARTS = 10  # in which all rows are pushed before
HASH = 0x9E3779B97F4A7C15  # spreads the ids of tables that grow


def _table(args: argparse.Namespace, rows: int) -> kv.Table:
    return kv.Table(dim=args.width, init="constant") if args.grows else kv.Table((rows, args.width), init="constant")


def _ids(args: argparse.Namespace, numbers: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    return (numbers.astype(np.uint64) * np.uint64(HASH)).view(np.int64) if args.grows else numbers


def main() -> None:
    """Measure; rank 0 reports. With plain SGD in rounds the rows are checked."""
    options = parser()
    options.add_argument("--type", default="dist_sync")
    options.add_argument("--optimizer", default="sgd")
    options.add_argument("--tables", type=int, default=1, help="among which the rows are divided")
    options.add_argument("--rows", type=int, default=1_000_000, help="of all tables")
    options.add_argument("--width", type=int, default=64)
    options.add_argument("--batch", type=int, default=8192, help="random ids of a round; duplicates count once")
    options.add_argument("--fresh", action="store_true", help="each id comes for the first time")
    options.add_argument("--grows", action="store_true", help="the tables grow, and ids are any 64 bits")
    options.add_argument("--push", action="store_true", help="pull nothing")
    options.add_argument("--array", action="store_true", help="push the rows of arrays, with --push")
    args = options.parse_args()

    store = kv.create(args.type)
    store.set_optimizer(args.optimizer, learning_rate=0.01)
    keys = [f"table {number}" for number in range(args.tables)]
    size = args.rows // args.tables
    store.init(keys, [torch.ones(size, args.width) if args.array else _table(args, size) for _ in keys])
    for start in () if args.fresh else range(0, size, size // PARTS):  # as if trained for a while, as MXNet's are
        ids = _ids(args, np.arange(start, min(start + size // PARTS, size)))
        store.push(keys, [kv.RowSparse(ids, torch.zeros(len(ids), args.width)) for _ in keys], wait=True)
    draws = np.random.default_rng(store.rank)
    orders = [np.random.default_rng(number).permutation(size) for number in range(args.tables)]
    parts = itertools.count(store.rank, store.num_workers)  # of these orders, of which each round takes the next
    drawn: list[tuple[list[np.ndarray], list[kv.RowSparse], list[torch.Tensor]]] = []

    def before() -> None:
        count = args.batch // args.tables
        if args.fresh:
            start = next(parts) * count
            picked = [order[start : start + count] for order in orders]
        else:
            picked = [draws.integers(0, size, count) for _ in keys]
        ids = [np.unique(_ids(args, each)) for each in picked]
        grads = [kv.RowSparse(each, torch.ones(len(each), args.width)) for each in ids]
        drawn[:] = [(ids, grads, [torch.zeros(len(each), args.width) for each in ids])]
        store.barrier()

    def one_round() -> None:
        ids, grads, outs = drawn[0]
        if args.push:
            store.push(keys, grads, wait=True)
        else:
            store.pushpull(keys, grads, outs, row_ids=ids)

    figures = measured(one_round, args.rounds, before)
    ids, _, outs = drawn[0]
    if args.array:
        wholes = [torch.empty(size, args.width) for _ in keys]
        store.pull(keys, wholes)
        outs = [whole[each] for whole, each in zip(wholes, ids, strict=True)]
    elif args.push:
        store.row_sparse_pull(keys, outs, row_ids=ids)
    if args.type == "dist_sync" and args.optimizer == "sgd" and not all(bool((out < 1).all()) for out in outs):
        raise SystemExit("a row has not been updated")
    if store.rank == 0:
        report(args.report, **figures, rows=sum(map(len, ids)))
    store.close()


if __name__ == "__main__":
    main()
