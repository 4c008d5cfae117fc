"""A worker's rounds with tables: rows are pushed, and the same rows pulled; each round has other random ids."""

from __future__ import annotations

import numpy as np
import torch

import kvstore as kv
from benchmarks.programs.stopwatch import measured, parser, report

PARTS = 10  # in which all rows are pushed before


def main() -> None:
    """Measure; rank 0 reports. With plain SGD in rounds the rows are checked."""
    options = parser()
    options.add_argument("--type", default="dist_sync")
    options.add_argument("--optimizer", default="sgd")
    options.add_argument("--tables", type=int, default=1, help="among which the rows are divided")
    options.add_argument("--rows", type=int, default=1_000_000, help="of all tables")
    options.add_argument("--width", type=int, default=64)
    options.add_argument("--batch", type=int, default=8192, help="random ids of a round; duplicates count once")
    args = options.parse_args()

    store = kv.create(args.type)
    store.set_optimizer(args.optimizer, learning_rate=0.01)
    keys = [f"table {number}" for number in range(args.tables)]
    size = args.rows // args.tables
    store.init(keys, [kv.Table(shape=(size, args.width), init="constant") for _ in keys])
    for start in range(0, size, size // PARTS):  # as if trained for a while: all rows are in memory, as MXNet's are
        ids = np.arange(start, min(start + size // PARTS, size))
        store.push(keys, [kv.RowSparse(ids, torch.zeros(len(ids), args.width)) for _ in keys], wait=True)
    draws = np.random.default_rng(store.rank)
    drawn: list[tuple[list[np.ndarray], list[kv.RowSparse], list[torch.Tensor]]] = []

    def before() -> None:
        ids = [np.unique(draws.integers(0, size, args.batch // args.tables)) for _ in keys]
        grads = [kv.RowSparse(each, torch.ones(len(each), args.width)) for each in ids]
        drawn[:] = [(ids, grads, [torch.zeros(len(each), args.width) for each in ids])]
        store.barrier()

    def one_round() -> None:
        ids, grads, outs = drawn[0]
        store.pushpull(keys, grads, outs, row_ids=ids)

    figures = measured(one_round, args.rounds, before)
    ids, _, outs = drawn[0]
    if args.type == "dist_sync" and args.optimizer == "sgd" and not all(bool((out < 1).all()) for out in outs):
        raise SystemExit("a row has not been updated")
    if store.rank == 0:
        report(args.report, **figures, rows=sum(map(len, ids)))
    store.close()


if __name__ == "__main__":
    main()
