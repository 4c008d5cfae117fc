"""The same arrays summed by torch.distributed's gloo, as one flat tensor: what PyTorch's users have today on CPUs."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time

import torch
import torch.distributed as dist
from networks import NETWORKS


def main() -> None:
    """Measure, and print the median and the minimum in milliseconds as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--net", default="resnet50")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--file", required=True, help="where the processes meet")
    args = parser.parse_args()

    rank, world = int(os.environ["DMLC_TASK_ID"]), int(os.environ["DMLC_NUM_WORKER"])
    dist.init_process_group("gloo", init_method=f"file://{args.file}", rank=rank, world_size=world)
    flat = torch.ones(sum(math.prod(shape) for shape in NETWORKS[args.net]()))
    times = []
    for number in range(args.rounds + 3):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(flat)
        if number >= 3:
            times.append(1000 * (time.perf_counter() - start))
        flat.fill_(1.0)
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps({"median": statistics.median(times), "least": min(times)}), flush=True)


if __name__ == "__main__":
    main()
