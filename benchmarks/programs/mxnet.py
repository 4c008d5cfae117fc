"""The same rounds in MXNet: all keys pushed, the first layers' with the highest priority, then all pulled."""

from __future__ import annotations

import mxnet as mx

from benchmarks.networks import shapes_of
from benchmarks.programs.stopwatch import parser, report, timed


def main() -> None:
    """Measure; rank 0 reports."""
    options = parser()
    options.add_argument("--net", default="resnet50")
    options.add_argument("--type", default="dist_sync")
    options.add_argument("--optimizer", default="none")
    args = options.parse_args()

    store = mx.kv.create(args.type)
    shapes = shapes_of(args.net)
    if args.optimizer != "none":
        momentum = {"momentum": 0.9} if args.optimizer == "sgd" else {}
        store.set_optimizer(mx.optimizer.create(args.optimizer, learning_rate=0.01, **momentum))
    for key, shape in enumerate(shapes):
        store.init(key, mx.nd.zeros(shape))
    gradients = [mx.nd.random.uniform(-1, 1, shape=shape) for shape in shapes]
    weights = [mx.nd.zeros(shape) for shape in shapes]
    mx.nd.waitall()

    def one_round() -> None:
        for key, gradient in enumerate(gradients):
            store.push(key, gradient, priority=-key)
        for key, weight in enumerate(weights):
            store.pull(key, weight, priority=-key)
        for weight in weights:
            weight.wait_to_read()

    times = timed(one_round, args.rounds)
    if store.rank == 0:
        report(args.report, times=times)


if __name__ == "__main__":
    main()
