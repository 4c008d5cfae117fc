"""What checkpoints cost a job that trains: how long a step stalls, and how much longer training takes.

    launch.py -n 1 -s 1 --checkpoint-dir DIR python benchmarks/programs/checkpoints.py --compute 0.3

Each worker computes for a given time, then pushes and pulls so many megabytes for each server, which update with
momentum. Every ``--every`` steps there is a checkpoint. The stall is what the call, and the step that follows it, take
beyond the median step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch

import kvstore as kv


def compute(seconds: float, matrix: torch.Tensor) -> None:
    """Keep this worker's thread busy for so long."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        matrix @ matrix


def main() -> None:
    """Run as one worker of a job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=102, help="of values on each server")
    parser.add_argument("--compute", type=float, default=0.3, help="seconds of computation in a step")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    store = kv.create("dist_sync")
    store.set_optimizer("sgd", learning_rate=0.01, momentum=0.9)
    servers = int(os.environ["DMLC_NUM_SERVER"])
    count = 16
    size = int(options.megabytes * 1e6 / 4 * servers / count)
    keys = list(range(count))
    values = [store.empty(size) for _ in keys]
    for value in values:
        value.fill_(0.01)
    store.init(keys, values)
    outs = [torch.empty(size) for _ in keys]
    matrix = torch.rand(300, 300)
    times: dict[str, list[float]] = {"plain": [], "call": [], "with": [], "after": []}
    for step in range(options.steps):
        began = time.perf_counter()
        saves = step % options.every == options.every - 1
        if saves:
            store.save_checkpoint()
            times["call"].append(time.perf_counter() - began)
        compute(options.compute, matrix)
        store.pushpull(keys, values, outs)
        took = time.perf_counter() - began
        since = (step + 1) % options.every
        if step >= 5:
            times["with" if saves else "after" if since in (1, 2) and step >= options.every else "plain"].append(took)
    plain = statistics.median(times["plain"])
    if store.rank == 0:
        stalls = [took - plain for took in times["with"]]
        after = statistics.median(times["after"]) - plain
        quartiles = [round(1e3 * quartile) for quartile in statistics.quantiles(times["plain"])]
        call = times["call"]
        print(f"step without a checkpoint: median {1e3 * plain:.0f} ms, quartiles {quartiles}")
        print(f"the call: median {1e3 * statistics.median(call):.1f} ms, at most {1e3 * max(call):.1f}")
        each = [round(1e3 * stall) for stall in stalls]
        print(f"stall of the step: median {1e3 * statistics.median(stalls):.1f} ms, each {each}")
        print(f"each of the two steps after it: median {1e3 * after:.1f} ms longer")
        print(store.statistics())
    store.close()


if __name__ == "__main__":
    main()
