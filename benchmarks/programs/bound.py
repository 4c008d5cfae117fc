"""What memory alone takes for a round: processes that copy all in, sum a share each, and copy all out, at once."""

from __future__ import annotations

import multiprocessing
from argparse import Namespace
from multiprocessing.synchronize import Barrier

import torch

from benchmarks.networks import elements, shapes_of
from benchmarks.programs.stopwatch import measured, parser, report


def work(rank: int, args: Namespace, together: Barrier) -> None:
    """Measure in one of the processes; the first one reports."""
    torch.set_num_threads(1)
    size = elements(shapes_of(args.net))
    own, shared = torch.ones(size), torch.ones(size)
    parts = [torch.ones(size // args.workers) for _ in range(args.workers)]
    total = torch.ones(size // args.workers)

    def one_round() -> None:
        shared.copy_(own)
        together.wait()
        torch.add(parts[0], parts[-1], out=total)
        for part in parts[1:-1]:
            total.add_(part)
        together.wait()
        own.copy_(shared)
        together.wait()

    figures = measured(one_round, args.rounds, together.wait)
    if rank == 0:
        report(args.report, **figures)


def main() -> None:
    """Start the processes."""
    options = parser()
    options.add_argument("--net", default="resnet50")
    options.add_argument("-n", dest="workers", type=int, default=2)
    args = options.parse_args()
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(args.workers)
    processes = [context.Process(target=work, args=(rank, args, together)) for rank in range(args.workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    raise SystemExit(max(process.exitcode or 0 for process in processes))


if __name__ == "__main__":
    main()
