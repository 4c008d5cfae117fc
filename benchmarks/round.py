"""A worker's part of the push-pull measurement: rounds in which every array is pushed and pulled. Rank 0 prints."""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from networks import NETWORKS

import kvstore as kv


def main() -> None:
    """Measure, and print the median and the minimum in milliseconds as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--net", default="resnet50")
    parser.add_argument("--type", default="dist_sync")
    parser.add_argument("--optimizer", default="none")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()

    store = kv.create(args.type)
    shapes = NETWORKS[args.net]()
    keys = list(range(len(shapes)))
    weights = [torch.zeros(shape) for shape in shapes]
    gradients = [torch.ones(shape) for shape in shapes]
    if args.optimizer != "none":
        momentum = {"momentum": 0.9} if args.optimizer == "sgd" else {}
        store.set_optimizer(args.optimizer, learning_rate=0.01, **momentum)
    store.init(keys, weights)
    times = []
    for number in range(args.rounds + 3):
        store.barrier()
        start = time.perf_counter()
        store.pushpull(keys, gradients, out=weights)
        if number >= 3:
            times.append(1000 * (time.perf_counter() - start))
    if args.optimizer == "none" and not bool((weights[0] == store.num_workers).all()):
        raise SystemExit("the sum is wrong")
    store.close()
    if store.rank == 0:
        print(json.dumps({"median": statistics.median(times), "least": min(times)}), flush=True)


if __name__ == "__main__":
    main()
