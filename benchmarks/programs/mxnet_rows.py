"""The same rounds in MXNet: a row-sparse push, and a ``row_sparse_pull`` of the same rows."""

from __future__ import annotations

import mxnet as mx
import numpy as np

from benchmarks.programs.stopwatch import parser, report, timed


def main() -> None:
    """Measure; rank 0 reports."""
    options = parser()
    options.add_argument("--type", default="dist_sync")
    options.add_argument("--optimizer", default="sgd")
    options.add_argument("--rows", type=int, default=1_000_000)
    options.add_argument("--width", type=int, default=64)
    options.add_argument("--batch", type=int, default=8192)
    args = options.parse_args()

    store = mx.kv.create(args.type)
    store.set_optimizer(mx.optimizer.create(args.optimizer, learning_rate=0.01, lazy_update=True))
    shape = (args.rows, args.width)
    store.init("table", mx.nd.ones(shape).tostype("row_sparse"))
    draws = np.random.RandomState(store.rank)
    drawn: list[tuple[mx.nd.NDArray, mx.nd.NDArray, mx.nd.NDArray]] = []

    def before() -> None:
        ids = np.unique(draws.randint(0, args.rows, args.batch)).astype(np.int64)
        grad = mx.nd.sparse.row_sparse_array((mx.nd.ones((len(ids), args.width)), ids), shape=shape)
        drawn[:] = [(grad, mx.nd.sparse.zeros("row_sparse", shape), mx.nd.array(ids, dtype="int64"))]
        mx.nd.waitall()

    def one_round() -> None:
        grad, out, ids = drawn[0]
        store.push("table", grad)
        store.row_sparse_pull("table", out=out, row_ids=ids)
        out.wait_to_read()

    times = timed(one_round, args.rounds, before)
    if store.rank == 0:
        report(args.report, times=times)


if __name__ == "__main__":
    main()
