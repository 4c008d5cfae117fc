"""The same arrays summed by MPI's all-reduce as one flat array, as SINGA does it; ``mpirun`` starts this."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from benchmarks.networks import elements, shapes_of
from benchmarks.programs.stopwatch import measured, parser, report


def main() -> None:
    """Measure; rank 0 reports. The last sum is checked."""
    options = parser()
    options.add_argument("--net", default="resnet50")
    args = options.parse_args()

    world = MPI.COMM_WORLD
    flat = np.zeros(elements(shapes_of(args.net)), np.float32)

    def fill() -> None:
        flat.fill(1)
        world.Barrier()

    figures = measured(lambda: world.Allreduce(MPI.IN_PLACE, flat), args.rounds, fill)
    if flat[0] != world.size or flat[-1] != world.size:
        raise SystemExit("the sum is wrong")
    if world.rank == 0:
        report(args.report, **figures, library=MPI.Get_library_version())


if __name__ == "__main__":
    main()
