"""The same arrays summed by torch.distributed's gloo as one flat tensor, PyTorch's own way on CPUs."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from benchmarks.networks import elements, shapes_of
from benchmarks.programs.stopwatch import measured, parser, report


def main() -> None:
    """Measure; rank 0 reports."""
    options = parser()
    options.add_argument("--net", default="resnet50")
    options.add_argument("--meet", required=True, help="the file through which the processes find each other")
    args = options.parse_args()

    torch.set_num_threads(1)  # gloo sums in threads of its own: torch's would only wait
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{args.meet}", rank=rank, world_size=world)
    flat = torch.zeros(elements(shapes_of(args.net)))
    figures = measured(lambda: dist.all_reduce(flat), args.rounds, dist.barrier)
    if rank == 0:
        report(args.report, **figures)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
